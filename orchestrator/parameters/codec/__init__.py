"""Codecs: the values of a tensor to bytes, and back. One module for each; ``registry`` lists them.

A new codec is a module here that has a ``CODEC`` (``interface.Codec``), and its name in ``registry.CodecName``. Sizes, the
specification's choices, wire format, laboratory and metrics follow from these two, and so do the tests of
``tests/numerics``, which run over all codecs.
"""
