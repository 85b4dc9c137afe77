"""The parameter channel: payloads from the process that has them to the process that wants them, beside Ray.

    server ── serve(payload, content) ─▶ ticket(payload, island) ── by Ray's authenticated calls ─▶ client
       ▲                                                                                              │
       └──────────── ranges of 4 to 16 MiB over streams: mutual TLS, or a machine's shared memory ────┘

Only pulls: who wants bytes decides when they travel. It refuses to know what a payload means, and Ray, and JAX.
"""
