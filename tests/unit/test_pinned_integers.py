"""Integers that are given to a model are answered with those of the example, and checked, where nothing else helps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.errors import CaptureError, RunError
from autopar.lower.emit import lower


class PlacedPictures(nn.Module):
    """Positions of text and of a picture's patches, as multimodal models compute them: in Python, row by row.

    ``ids`` [rows words] are 0 for text and 1 for patches, ``grid`` [rows 2] the height and width of a row's picture,
    ``mask`` [rows words] which words there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2, 4), nn.Linear(4, 1)
        self.deltas: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor, grid: torch.Tensor, mask: torch.Tensor, at_first: bool) -> torch.Tensor:
        if self.deltas is None or at_first:
            positions = torch.zeros_like(ids)
            deltas = []
            for row, words in enumerate(ids):
                n_patches = grid[row][0].item() * grid[row][1].item()
                n_words = words[mask[row].bool()].numel() - n_patches
                places = torch.cat([torch.arange(n_words), torch.arange(n_patches) + n_words])
                positions[row, mask[row].bool()] = places
                deltas.append(places.max() + 1 - len(words))
            self.deltas = torch.tensor(deltas).unsqueeze(1)
        else:
            positions = torch.zeros_like(ids) + self.deltas
        return (self.head(self.words(ids)).squeeze(-1) * positions * mask).square().mean()


def _batch(height: int = 2) -> tuple[torch.Tensor, ...]:
    ids, mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]] * 2), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    return ids, torch.tensor([[2, 2], [height, 2]]), mask


def test_integers_and_masks_that_sizes_follow_from() -> None:
    torch.manual_seed(0)
    model = PlacedPictures()
    with pytest.warns(UserWarning, match=r"are those of this batch.*a call with others is an error"):
        captured = capture(model, (*_batch(), True))
    assert model.deltas is None
    assert compare_with_eager(captured, model, (*_batch(), True), {}, bounded=False).same
    graph, plan = captured.graph, one_device(captured.graph)
    state = state_of(captured, model)
    for height, differs in ((2, False), (1, True)):
        inputs = inputs_of(captured, (*_batch(height), True), {})
        buffers = run_step(graph, plan, lower(graph, plan), *state, inputs).buffers
        assert any(buffers[way.name] for way in graph.ways) == differs


def test_attribute_that_the_next_call_reads_is_refused() -> None:
    """Without ``at_first`` the second call would go on with what the first one kept."""
    with pytest.raises(CaptureError, match=r"'deltas' at test_pinned_integers\.py"):
        capture(PlacedPictures(), (*_batch(), False))


class Selected(nn.Module):
    """A loss over the labels that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = labels != -100
        return F.cross_entropy(self.head(x)[seen], labels[seen])


@pytest.mark.filterwarnings("ignore:numbers and masks")
def test_a_mask_that_differs_is_an_error() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(4, 4), torch.tensor([0, -100, 2, 1])
    model = Selected()
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, labels))
    assert float(pm(x, labels)) == pytest.approx(float(Selected.forward(model, x, labels)), rel=1e-6)
    with pytest.raises(RunError, match=r"(?s)reads numbers or a mask that depend on the batch.*ignore_index"):
        pm(x, labels.roll(1))


class Parts(nn.Module):
    """Splits its columns as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.square().mean() for part in self.layer(x).split(sizes.tolist(), 1)]).sum()


def test_another_shape_whose_list_has_other_integers_says_whose_numbers_it_has() -> None:
    """Torch's own error has the sum of the example's sizes, beside a call with others."""
    pm = autopar.parallelize(Parts(), 1, (torch.randn(4, 8, 4), torch.tensor([3, 5])))
    with pytest.raises(CaptureError, match=r"(?s)called with .*10.*integers that the model reads from its inputs at "
                       r".*test_pinned_integers\.py:\d+ are those of the first example"):  # fmt: skip
        pm(torch.randn(4, 10, 4), torch.tensor([4, 6]))


class Counted(nn.Module):
    """Hands integers of a tensor to functions of torch that take sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        places = torch.arange(grid[:, 0].sum())
        h, w = grid[0]
        pictures = F.interpolate(self.layer(x)[:, None, None], size=(h, w))
        rolled = pictures.roll(shifts=grid[1, 1], dims=3)[:, :, : grid[1, 0]]
        return (rolled * torch.full((h,), 2.0).mean()).square().mean() * places.float().mean()


class Strides(nn.Module):
    """Pads to a multiple of its stride, which is a buffer, as models of sound do; counts how often where it is told."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts = nn.Conv1d(1, 3, 3, stride=2), counts
        self.register_buffer("stride", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = torch.ceil((x.shape[-1] - 3) / self.stride + 1).to(torch.int64)
        padded = F.pad(x, (0, (n - 1) * self.stride + 3 - x.shape[-1]))
        if self.counts:
            self.stride += 1
        return self.layer(padded[..., : padded.shape[-1]]).square().mean()


class WithPictures(nn.Module):
    """Leaves out pictures that are padding, all zeros, and asks for their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[(x == 0).sum(1) != x.shape[1]]
        return (self.layer(x) * torch.arange(len(x) * 2).view(len(x), 2)).square().mean()


class Distinct(nn.Module):
    """A mean for each of the labels that there are, weighed by how often it is there, and windows without doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there, which, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = x.new_zeros(len(there), 2).index_add(0, which.reshape(-1), self.layer(x))
        starts = torch.unique_consecutive(torch.tensor([0, 1, 1, 3]))
        return (sums / counts[:, None] * there[:, None]).square().mean() + self.layer(x)[starts].mean()


@pytest.mark.filterwarnings("ignore:numbers and masks")
@pytest.mark.parametrize("case", ["sizes", "stride", "pictures", "distinct"])
def test_numbers_that_torch_reads_of_tensors(case: str) -> None:
    torch.manual_seed(0)
    model, args, others = {
        "sizes": (Counted(), (torch.randn(3, 4), torch.tensor([[2, 3], [1, 2]])), (torch.tensor([[2, 3], [1, 1]]),)),
        "stride": (Strides(False), (torch.randn(2, 1, 8),), ()),
        "pictures": (WithPictures(), (torch.randn(3, 4),), ()),
        "distinct": (Distinct(), (torch.randn(4, 4), torch.tensor([[3, 1], [3, 2]])), (torch.tensor([[3, 1]] * 2),)),
    }[case]
    captured = capture(model, args)
    graph, plan, state = captured.graph, one_device(captured.graph), state_of(captured, model)
    assert compare_with_eager(captured, model, (torch.randn_like(args[0]), *args[1:]), {}, bounded=False).same
    args = (args[0] * torch.tensor([[1.0], [0.0], [1.0]]),) if case == "pictures" else (args[0], *others)
    buffers = run_step(graph, plan, lower(graph, plan), *state, inputs_of(captured, args, {})).buffers
    assert any(buffers[way.name] for way in graph.ways) == (case != "stride")


def test_numbers_of_a_buffer_that_changes_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"a shape depends on one|depends on the value of a tensor"):
        capture(Strides(True), (torch.randn(2, 1, 8),))


class SomePictures(WithPictures):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (x > 0))


def test_a_mask_of_floats_that_leaves_something_out_is_refused() -> None:
    x = torch.randn(3, 4)
    x[1] = -1.0
    with pytest.raises(CaptureError, match=r"takes rows that a mask selects"):
        capture(SomePictures(), (x,))


class ByListsOfPlaces(nn.Module):
    """Marks places that come as lists of tensors, of rows and of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows, columns = zip(*places, strict=True)
        kept = torch.ones_like(x)
        kept[rows, columns] = 0.0
        return (self.layer(x) * kept).square().mean()


def test_places_in_lists_of_tensors() -> None:
    model = ByListsOfPlaces()
    captured = capture(model, (torch.randn(3, 4), torch.tensor([[0, 1], [2, 3]])))
    assert not captured.graph.ways
    others = torch.randn(3, 4), torch.tensor([[1, 1], [1, 0]])
    assert compare_with_eager(captured, model, others, {}, bounded=False).same
