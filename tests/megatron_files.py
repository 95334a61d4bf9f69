"""Megatron's token files, written byte by byte, as its own documentation describes them."""

import struct

SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14], [255, 0]]
DOCUMENTS = [0, 1, 3, 5]  # the first document is one sequence; the others have two each
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}


def write(prefix, kind="H", sequences=SEQUENCES, documents=DOCUMENTS):
    """The pair of files as Megatron-LM's `IndexedDatasetBuilder` leaves it."""
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind])
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    place = 0
    for sequence in sequences:
        index += struct.pack("<q", place)
        place += len(sequence) * struct.calcsize(f"<{kind}")
    index += b"".join(struct.pack("<q", number) for number in documents)
    prefix.with_suffix(".idx").write_bytes(index)
    return str(prefix)
