"""Training loops that people already have, over ReCoVer's step. Layer: the top; each needs its extra.

``huggingface`` (Trainer), ``lightning``, ``torchtitan``, ``nanotron``: one module each, imported only
by those who use it.
"""
