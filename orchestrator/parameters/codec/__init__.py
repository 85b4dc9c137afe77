"""Codecs turn the values of a tensor into bytes and back.

``registry`` has their names and the protocol that each follows; ``codecs`` has the codecs themselves.
"""
