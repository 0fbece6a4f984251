"""Errors name the cause, not the place. Expected outcomes (a full pool, a refusal) are values, not
errors."""

from __future__ import annotations


class RtpError(Exception):
    """Base of all errors that rtp raises on purpose."""


class ConfigError(RtpError):
    """A setting cannot be used; the message says which and what would be accepted."""


class IllegalMove(RtpError):
    """A request was asked to make a move its phase does not allow."""


class ShapeError(RtpError):
    """An array has a shape or dtype that an operation cannot take."""


class ProtocolError(RtpError):
    """A peer sent something the protocol does not allow at this point."""


class TransferFailed(RtpError):
    """Pages did not come, or not all of them: the peer is gone, or keeps them no longer."""


class WeightsError(RtpError):
    """A checkpoint is missing, truncated, inconsistent or outside its folder; names file and
    tensor."""


class TemplateError(RtpError):
    """A chat template refused the messages; the text is the template's own."""
