"""Gradients as flat buckets: accumulate here, reduce there. Needs torch.

``buckets`` lays gradients out in flat fp32 storage and reduces them out of place, so that a rank's
own gradient is its own snapshot; ``snapshots`` keeps real copies where reduction is in place;
``replication`` makes parameters equal at the start.
"""
