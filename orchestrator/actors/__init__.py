"""The interfaces of the actors of a job, and typed calls to them.

``handle`` calls the methods of an actor's class or interface by name, so that type checkers compare name, arguments and
answer. ``island``, ``evaluator`` and ``synchroniser`` are the interfaces of actors whose class the caller does not import,
because it is heavy or lies in a package above. Names of methods travel between builds and stay as they are; names of
arguments do not travel, so interfaces take them by position.
"""
