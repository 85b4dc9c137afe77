"""The decisions of the synchroniser, as pure code over the standard library: time comes in with events, requests go out.

The one entry point is ``Synchroniser.handle(event) -> effects``. Facts are in ``events``, requests in ``effects``, the words
both are made of in ``vocabulary``. Everything else here is a frozen sub-machine of that one class.
"""
