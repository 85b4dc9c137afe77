"""The migrations of the store's tables, one step a file, applied in order by ``api.storage.store``.

A change to a table is made twice: in its row class, and as the next file in ``versions``. ``tests/api/test_store.py``
compares the two. A file that was released is never changed: databases out there have taken that step already.
"""
