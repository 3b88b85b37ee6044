from __future__ import annotations

import importlib
import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.packing import read_lengths, read_megatron_index


def index_bytes(
    lengths: list[int],
    boundaries: list[int],
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    type_code: int = 4,
    modes: bytes = b"",
) -> bytes:
    """Return the file, byte by byte as its format is documented."""
    parts = [magic, struct.pack("<Q", version), struct.pack("<B", type_code)]
    parts += [struct.pack("<Q", len(lengths)), struct.pack("<Q", len(boundaries))]
    parts += [struct.pack("<i", length) for length in lengths]
    place = 0
    for length in lengths:
        parts.append(struct.pack("<q", place))
        place += 4 * length
    parts += [struct.pack("<q", boundary) for boundary in boundaries]
    return b"".join([*parts, modes])


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=8), st.booleans())
def test_documents_are_sums_of_their_sequences(tmp_path_factory, documents, has_modes):
    path = tmp_path_factory.mktemp("index") / "data.idx"
    sequences = [length for document in documents for length in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    path.write_bytes(index_bytes(sequences, boundaries, modes=b"\x01" * len(sequences) * has_modes))
    assert read_megatron_index(path).tolist() == [sum(document) for document in documents]


def test_a_dataset_is_found_by_each_of_its_names(tmp_path: Path):
    (tmp_path / "my.data_document.idx").write_bytes(index_bytes([3, 0, 5], [0, 1, 2, 3]))
    (tmp_path / "my.data_document.bin").write_bytes(b"")
    (tmp_path / "copied").write_bytes(index_bytes([3, 0, 5], [0, 1, 2, 3]))
    names = ("my.data_document.idx", "my.data_document.bin", "my.data_document", "copied")
    for name in names:
        document_lengths = read_lengths(tmp_path / name)
        assert document_lengths.tokens.tolist() == [3, 5]
        assert document_lengths.num_empty == 1
        assert document_lengths.microbatch_ends is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not the index of a Megatron dataset"),
        (index_bytes([1], [0, 1], magic=b"TNTIDX\x00\x00\x00"), "not the index of a Megatron"),
        (index_bytes([1], [0, 1], version=2), "index version 2"),
        (index_bytes([1, 2], [0, 2])[:-1], r"73 bytes, but 2 sequences .* take 74"),
        (index_bytes([1, 2], [0, 2, 1, 2]), "do not rise from 0 to 2 sequences"),
        (index_bytes([1, -2], [0, 2]), "a sequence has a negative length"),
        # Counts beyond any memory.
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2**60, 2**60), "26|34 bytes, but"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "data.idx"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_megatron_index(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_document_longer_than_offsets_count_is_named(tmp_path: Path):
    path = tmp_path / "data.idx"
    path.write_bytes(index_bytes([5, 2**31 - 1, 2**31 - 1, 1], [0, 1, 2, 4]))
    with pytest.raises(ConfigError, match="document 2: a document of 2147483648 tokens"):
        read_lengths(path)


@pytest.fixture
def indexed():
    """Megatron's module of datasets; its package imports triton, which CPU builds of torch lack."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    from chunkgraph.megatron.cpu.host import cpu_host

    with cpu_host():
        yield importlib.import_module("megatron.core.datasets.indexed_dataset")


@pytest.mark.megatron
@pytest.mark.every_release
def test_megatron_and_we_agree_on_files(tmp_path: Path, indexed):
    torch = pytest.importorskip("torch")
    documents = [[5, 2], [1], [7, 3, 3], [4]]
    prefix = str(tmp_path / "theirs")
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.arange(sum(document)), document)
    builder.finalize(f"{prefix}.idx")
    expected = [sum(document) for document in documents]
    assert read_lengths(Path(prefix)).tokens.tolist() == expected

    # Megatron's module reads the files of these tests.
    sequences = [length for document in documents for length in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    (tmp_path / "ours.idx").write_bytes(index_bytes(sequences, boundaries))
    (tmp_path / "ours.bin").write_bytes(b"\x00" * 4 * sum(sequences))
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert theirs.sequence_lengths.tolist() == sequences
    assert theirs.document_indices.tolist() == boundaries
    assert read_lengths(tmp_path / "ours").tokens.tolist() == expected
