"""The two policies on Megatron-Core.

With the in-process engine the only floor that imports `megatron.core`.
"""

import warnings

# What Megatron-Core and torch.distributed say about their own missing extras and coming renames on
# every start; what was chosen instead is logged once and shown by `binac doctor`.
for _module in (r"megatron\.core", r"torch\.distributed"):
    warnings.filterwarnings("ignore", module=_module)
