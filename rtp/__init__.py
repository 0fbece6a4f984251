"""rtp: an LLM serving system with a global scheduler (the Master) and workers that run models."""

__version__ = "0.1.0"
