"""The image of ``deploy/Dockerfile``, built without a container engine, and run as ``deploy/compose.yaml`` wires it.

``python -m tests.image`` (``make image-check``), as root on Debian. buildah builds, in a chroot; bubblewrap makes each
container of its root file system: read-only, as the image's user, without a capability, in a network namespace of its own.
"""
