"""Every op in plain torch: the reference that each kernel is tested against, and the path of devices without kernels.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`; any device, any floating dtype. Not here: checks of the
arguments, which the public ops make.
"""
