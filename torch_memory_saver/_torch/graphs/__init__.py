"""cuda_graph(), and the objects that PyTorch keeps and that graphs rely on."""
