"""The ULFM port: the protocol's collective effects over Open MPI 5. The only importer of mpi4py.

``transport`` owns the communicators and the world epoch; ``process_group`` gives them the face of a
torch process group. All MPI calls of a rank are made by one thread, the one that joined.
"""
