"""Commands of `python -m rtp.replay`, one a module: `Config` (its options) and `main(config)`."""
