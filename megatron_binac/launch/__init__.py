"""Jobs on Slurm or on this machine through NeMo-Run: checked first, then submitted, then watched.

Only `launch.nemo` imports NeMo-Run, and nothing of it runs on a compute node.
"""
