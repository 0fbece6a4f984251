"""What moves KV pages between workers: one file each, `build(**params)` makes a Transport
(core/ports), BACKENDS names the backends whose pages it can move."""
