"""``torch.distributed.checkpoint`` through our storage: existing ``dcp.save`` and ``dcp.load`` calls go on.

::

    dcp.save(state_dict, storage_writer=DcpWriter("ckpt", step=100))
    dcp.load(state_dict, storage_reader=DcpReader("ckpt"))

Theory of operation. Each rank writes one body and one fragment, as a node of one rank; the coordinator
commits the manifest in `DcpWriter.finish`, when all have. So a step is there whole or not at all, every byte
is proved when it is read, and ``easyckpt ls``, ``verify`` and ``prune`` work. What the ranks have to know of
each other (generation, run) rides on the plans that DCP sends around anyway.

DCP stores what is no tensor as pickles (byte items). They are kept as they are, under ``foreign``, and
before a planner gets one to unpickle it is proved that a weights-only load takes it, so loading runs no code
from the checkpoint.

Several saves of one process to one folder are one life of the job, as long as the steps grow. `DcpReader`
notes the step that this process resumed from; what an earlier life saved beyond it is left behind.

A reader also takes steps that `Checkpointer.save` wrote, by the names of their tensors.
"""

from __future__ import annotations

from easyckpt.interop.dcpreader import DcpReader
from easyckpt.interop.dcpwriter import DcpWriter

__all__ = ["DcpReader", "DcpWriter"]
