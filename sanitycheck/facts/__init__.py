"""Looking at the machine: one module per family, each with a frozen facts class, ``collect`` and pure
parsers.

``collect(request)`` runs in a probe child (:mod:`sanitycheck.probe`), so it may block, and it may leave
cleaning up after a kill to the end of its process. It returns facts and judges nothing. Every field of a
facts class has the value of a healthy node as default, so that a drill names only what differs.
"""
