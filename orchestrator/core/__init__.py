"""The decisions of the synchroniser: pure, standard library only, told the time, returning requests.

One door: ``Synchroniser.handle(event) -> effects``. What may happen is in ``events``, what may be asked for in
``effects``, the words both are made of in ``vocabulary``. Everything else here is a frozen sub-machine of that one class.
"""
