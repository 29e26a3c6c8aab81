"""Copying a state into a slot while training goes on, and proving that it did not change meanwhile.

=============  ======================================================================================
module         does
=============  ======================================================================================
``plan``       which tensors are copied at once, which later, and in what pieces
``witness``    taken when ``save`` is called; must still hold when the copy is done
``job``        one copy on its way: its pieces, and who waits for it
``fence``      waits for all copies of this process before the state may change
``pace``       whether overlapping pays, from what saves have cost
``touch``      makes a slot's pages present before they are written
``stager``     one save from the state to the seal
=============  ======================================================================================
"""

from __future__ import annotations
