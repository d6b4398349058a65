"""Training loops that people already have, over ReCoVer's step. Layer: the top.

``huggingface`` (Trainer), ``lightning``, ``torchtitan``, ``nanotron``: one module each, which needs
its extra and is imported only by those who use it.
"""
