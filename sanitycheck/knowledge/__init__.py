"""What is known of devices and messages before anything is looked at: the tables in ``sanitycheck/data/``.

Each loader reads its table once, checks its shape, its units and that a name fits one entry only, and fails
loudly on the first slip: a wrong table condemns good nodes.
"""
