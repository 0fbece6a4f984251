"""`python -m rtp.replay COMMAND`: request traces through the Master, frontend and workers that
serve, in virtual time or against a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from rtp.core.errors import RtpError
from rtp.replaying import ablate, convert, describe, formats, plan, run, tune
from rtp.settings import load

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended, as shells have it."""
BROKEN_PIPE = 141
"""Exit code of what ended because nobody reads on, as shells have it."""
PROG = "python -m rtp.replay"
# Any: each command takes its own Config.
COMMANDS: dict[str, Any] = {
    "run": run,
    "ablate": ablate,
    "tune": tune,
    "plan": plan,
    "describe": describe,
    "convert": convert,
    "formats": formats,
}


def main(argv: Sequence[str]) -> int:
    """The exit code: 2 with a sentence where the options, the trace or the place of the results are
    at fault."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"{PROG}: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        config = load(command.Config, argv[1:], os.environ, f"{PROG} {name}")
        code = int(command.main(config))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{PROG} {name}: interrupted; nothing is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RtpError as error:
        print(f"{PROG} {name}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{PROG} {name}: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def usage() -> str:
    lines = [f"usage: {PROG} COMMAND [options]", "", "commands (COMMAND --help lists its options):"]
    for name, command in COMMANDS.items():
        does = (command.Config.__doc__ or "").partition(": ")[2].partition("\n")[0]
        lines.append(f"  {name:<10} {does}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
