"""Guards operators of sparse tensors on the simulated GPU: the CPU's results on the device, or a refusal that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
]

SIZE = (3, 3)


def coo(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix of which one element is given twice."""
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]], device=device)
    return torch.sparse_coo_tensor(indices, torch.tensor([1, 2, 3], dtype=dtype, device=device), SIZE)


def csr(device: str) -> torch.Tensor:
    return dense(device).remainder(4).to_sparse_csr()


def dense(device: str) -> torch.Tensor:
    return torch.arange(9.0, device=device).reshape(SIZE)


def vector(device: str) -> torch.Tensor:
    return torch.arange(3.0, device=device)


def gradient(device: str) -> torch.Tensor | None:
    weights = dense(device).requires_grad_()
    torch.sparse.mm(coo(device), weights).sum().backward()
    return weights.grad


def gradient_of_sparse(device: str) -> torch.Tensor | None:
    matrix = coo(device).coalesce().requires_grad_()
    torch.sparse.mm(matrix, dense(device)).sum().backward()
    return matrix.grad


CALLS: dict[str, Callable[[str], Any]] = {
    "coalesce": lambda device: coo(device).coalesce(),
    "to_dense": lambda device: coo(device).to_dense(),
    "from dense": lambda device: dense(device).to_sparse(),
    "from dense to csc": lambda device: dense(device).to_sparse_csc(),
    "from dense to bsr": lambda device: dense(device).to_sparse_bsr(SIZE),
    "coo to csr": lambda device: coo(device).to_sparse_csr(),
    "add": lambda device: torch.add(coo(device), coo(device), alpha=2),
    "add to dense": lambda device: dense(device) + coo(device),
    "add to dense, in place": lambda device: dense(device).add_(coo(device)),
    "add, in place": lambda device: coo(device).add_(coo(device)),
    "add, out": lambda device: torch.add(
        coo(device), coo(device), out=torch.sparse_coo_tensor(size=SIZE, dtype=torch.float32, device=device)
    ),
    "multiply": lambda device: coo(device) * coo(device),
    "multiply by a number, in place": lambda device: coo(device).mul_(3),
    "divide": lambda device: coo(device) / 2,
    "negate": lambda device: -coo(device),
    "sine": lambda device: coo(device).sin(),
    "root, in place": lambda device: coo(device).coalesce().sqrt_(),
    "cat": lambda device: torch.cat([coo(device), coo(device)]),
    "index_select": lambda device: coo(device).index_select(0, torch.tensor([1], device=device)),
    "mask": lambda device: dense(device).sparse_mask(coo(device).coalesce()),
    "sum": lambda device: torch.sparse.sum(coo(device), 0),
    "norm": lambda device: coo(device).norm(),
    "softmax": lambda device: torch.sparse.softmax(coo(device), 1),
    "matrix": lambda device: torch.sparse.mm(coo(device), dense(device)),
    "sparse matrix": lambda device: torch.sparse.mm(coo(device).coalesce(), coo(device).coalesce()),
    "vector": lambda device: coo(device) @ vector(device),
    "addmm, out": lambda device: torch.addmm(dense(device), coo(device), dense(device), out=torch.empty(0, device=device)),
    "batch": lambda device: torch.bmm(dense(device)[None].to_sparse(), dense(device)[None]),
    "halves": lambda device: coo(device).half(),
    "transpose": lambda device: coo(device).t(),
    "csr, to_dense": lambda device: csr(device).to_dense(),
    "csr, to coo": lambda device: csr(device).to_sparse(),
    "csr, vector": lambda device: csr(device) @ vector(device),
    "csr, matrix": lambda device: torch.addmm(dense(device), csr(device), dense(device)),
    "csr, sparse matrix": lambda device: csr(device) @ csr(device),
    "csr, add, out": lambda device: torch.add(csr(device), csr(device), out=csr(device)),
    "csr, in place": lambda device: csr(device).sin_(),
    "csr, sampled": lambda device: torch.sparse.sampled_addmm(csr(device), dense(device), dense(device)),
    "csr, row": lambda device: csr(device)[1],
    "gradient": gradient,
    "gradient of the sparse matrix": gradient_of_sparse,
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_cpu_and_on_the_device(name: str) -> None:
    expected, found = (CALLS[name](device) for device in ("cpu", "cuda"))
    assert found.is_cuda and found.layout == expected.layout and found.dtype == expected.dtype
    if expected.layout == torch.sparse_coo:
        assert found.is_coalesced() == expected.is_coalesced()
    torch.testing.assert_close(found.cpu().to_dense(), expected.to_dense())


def test_arguments_are_written_and_returned() -> None:
    total = coo("cuda")
    assert total.add_(coo("cuda")) is total
    assert total.to_dense().tolist() == [[0, 0, 2], [10, 0, 0], [0, 0, 0]]
    out = torch.empty(0, device="cuda")
    assert torch.mm(coo("cuda"), dense("cuda"), out=out) is out
    assert out[0].tolist() == [6, 7, 8]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_sparse_gradients_train(kind: Any) -> None:
    trained = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = kind(5, 2, sparse=True, **({"mode": "sum"} if kind is nn.EmbeddingBag else {})).to(device)
        table.weight.data.copy_(torch.arange(10.0).reshape(5, 2))
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.tensor([[0, 1, 1]], device=device)) ** 2).sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
        trained.append(table.weight.detach().cpu())
    torch.testing.assert_close(trained[1], trained[0])


def test_what_the_cpu_lacks_is_refused_by_name() -> None:
    batch = dense("cuda")[None].to_sparse_csr()
    with pytest.raises(NotImplementedError, match=r"aten::bmm.* of sparse tensors has no CPU implementation"):
        torch.bmm(batch, dense("cuda")[None])
    torch.cuda.synchronize()


def test_tensors_of_the_host_are_refused() -> None:
    for call in (lambda: coo("cuda") @ dense("cpu"), lambda: coo("cuda").index_select(0, torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()


def test_a_capture_refuses_them() -> None:
    matrix = coo("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        matrix.coalesce()
    torch.cuda.synchronize()
