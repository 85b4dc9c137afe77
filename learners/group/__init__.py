"""An island of many hosts: one process on each, of which rank 0 decides and all carry out the same plans.

rank 0      IslandLoop with its Replica (learners.loop), reports, commands          ranks
rank 1 …    the same arrays' other parts, and no decision                           ranks
            short messages between them, which never wait for a step                link, messages
"""
