"""Random access to text, JSON lines and parquet, and the messages about bad files."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mhar_jax.data.files import embedded_text, list_files
from mhar_jax.data.fingerprints import what_differs
from mhar_jax.data.readers import ParquetFile, open_documents
from mhar_jax.errors import UserError


def write_parquet(path, texts, column="text", kind=None, group=3):
    pq.write_table(pa.table({"id": list(range(len(texts))), column: pa.array(texts, kind)}), path, row_group_size=group)


def read(path, file_format="auto", text_field="text"):
    documents = open_documents(str(path), file_format, text_field)
    backwards = [documents[i] for i in reversed(range(len(documents)))][::-1]
    assert list(documents) == backwards
    assert list(pickle.loads(pickle.dumps(documents))) == backwards
    return backwards


def message(path, file_format="auto", text_field="text"):
    """The error of reading everything."""
    with pytest.raises(UserError) as info:
        list(open_documents(str(path), file_format, text_field))
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\n\ntwo\nlines\n\n\n\nthree", ["one", "two\nlines", "three"]),
        (b"\n \n  indented\n\n   \n\t\nlast \n\n", ["  indented", "last"]),
        (b"\r\na\r\nb\r\n\r\nc\r\n", ["a\nb", "c"]),
        (b"\xef\xbb\xbfwith mark\n\nnext", ["with mark", "next"]),
        ("日本\n\né".encode(), ["日本", "é"]),
        (b"x", ["x"]),
        (b"a\n" + b" " * 200_000 + b"\nb", ["a", "b"]),  # quadratic patterns would take minutes
    ],
)
def test_text_blocks(tmp_path, content, expected):
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == expected


def test_json_lines(tmp_path):
    lines = [{"text": "a\nb", "id": 1}, {"id": 2, "text": ""}, {"text": "日本 \U0001f600"}]
    content = "\r\n".join(json.dumps(line) for line in lines[:2]) + "\n\n" + json.dumps(lines[2], ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read(tmp_path / "a.jsonl") == ["a\nb", "", "日本 \U0001f600"]
    (tmp_path / "b.ndjson").write_text('{"body": "x"}\n')
    assert read(tmp_path / "b.ndjson", text_field="body") == ["x"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(tmp_path, kind):
    texts = [f"text {i}" for i in range(20)]
    write_parquet(tmp_path / "a.parquet", texts, kind=kind)
    assert read(tmp_path / "a.parquet") == texts
    file = ParquetFile(tmp_path / "a.parquet", "text")
    assert [file[i] for i in range(20)] == texts
    assert len(file._cache) <= 4


def test_directories_and_globs_are_sorted_and_mixed(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("third")
    (tmp_path / "a.jsonl").write_text('{"text": "second"}\n')
    (tmp_path / "README.md").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    write_parquet(tmp_path / "A.parquet", ["first"])
    (tmp_path / "z.txt").write_text("")
    assert read(tmp_path) == ["first", "second", "third"]
    assert read(tmp_path, "jsonl") == ["second"]
    assert read(tmp_path / "*.jsonl") == ["second"]
    assert read(tmp_path / "**" / "*.txt") == ["third"]
    assert read(tmp_path / "README.md", "text") == ["not read"]


def test_embedded_text():
    documents = open_documents(None, "auto", "text")
    assert documents[0] == "PRIDE AND PREJUDICE"
    assert len(documents) > 3000
    assert (embedded_text().parent / "ORIGIN.md").is_file()


def test_listing_fingerprint_follows_names_and_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    before = open_documents(str(tmp_path), "auto", "text").listing_fingerprint()
    assert before == open_documents(str(tmp_path / "a.txt"), "auto", "text").listing_fingerprint()
    (tmp_path / "a.txt").write_text("one\n\ntwo.")
    assert before != open_documents(str(tmp_path), "auto", "text").listing_fingerprint()


def test_content_fingerprint_tells_files_of_one_size_apart(tmp_path, monkeypatch):
    def fingerprints(text):
        (tmp_path / "a.txt").write_text(text)
        documents = open_documents(str(tmp_path), "auto", "text")
        return documents.listing_fingerprint(), documents.content_fingerprint()

    one, other = fingerprints("one\n\ntwo"), fingerprints("one\n\nsix")
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one == fingerprints("one\n\ntwo")
    monkeypatch.setattr("mhar_jax.data.fingerprints._WHOLE", 64)
    monkeypatch.setattr("mhar_jax.data.fingerprints._BLOCK", 8)  # eight blocks of eight bytes
    long = "word " * 200
    whole = fingerprints(long)
    assert whole == fingerprints(long)
    assert whole[1] != fingerprints("W" + long[1:])[1]
    assert whole[1] != fingerprints(long[:-2] + "D ")[1]
    assert whole[1] == fingerprints(long[:20] + "W" + long[21:])[1]  # between two blocks: what samples cannot see


def test_unequal_fingerprints_say_what_differs():
    assert what_differs("a-bytes-256-c", "a-bytes-256-d") == ": their content"
    assert what_differs("a-bytes-256-c", "b-bytes-0-c") == (
        ": their names, sizes or numbers of documents and end-of-text tokens"
    )
    assert "only one of them covers the content" in what_differs("a-bytes-256", "a-bytes-256-c")
    assert "tokenised on the fly" in what_differs("a-bytes-256-c", "abc")
    assert what_differs("abc", "abd") == ""


def test_missing_and_unknown_files(tmp_path):
    assert "there is no file or directory" in message(tmp_path / "none.txt")
    assert "no file matches" in message(tmp_path / "*.txt")
    assert "holds no .txt, .text, .jsonl" in message(tmp_path)
    assert "holds no .parquet file" in message(tmp_path, "parquet")
    (tmp_path / "a.csv").write_text("x")
    assert "cannot tell the type of" in message(tmp_path / "a.csv")
    (tmp_path / "a.txt").write_text("\n \n")
    assert "holds no document" in message(tmp_path / "a.txt")
    assert list_files(str(tmp_path / "a.csv"), "text")[0][1] == "text"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 3: the line is not JSON"),
        ("   ", "line 3: the line is not JSON"),
        ("[" * 100_000, "line 3: the line is not JSON"),
        ("[1]", "line 3: the line must hold an object, got list"),
        ('{"body": "x"}', "line 3: there is no field 'text', only body; set data.text_field"),
        ('{"text": 3}', "line 3: field 'text' must be text, got int"),
        ('{"text": "\\ud800"}', "line 3: field 'text' is not valid text"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, expected):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    assert message(path).startswith(f"{path}, {expected}")


def test_invalid_utf8_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\nbad \xff")
    assert message(path) == f"{path}: invalid UTF-8 at byte 10 (invalid start byte)"
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "fine"}\n{"text": "\xff"}\n')
    assert message(path) == f"{path}: invalid UTF-8 at byte 30 (invalid start byte)"
    path = tmp_path / "a.parquet"
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"text": bad}), path)
    assert (
        message(path)
        == f"{path}, row group 0: cannot be read (In chunk 0: Invalid: Invalid UTF8 sequence at string index 0)"
    )


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("no parquet")
    assert message(path).startswith(f"data.path: {path} cannot be read as parquet")
    write_parquet(path, ["a", None, "c"])
    assert message(path) == f"{path}, row 1: column 'text' is null"
    assert message(path, text_field="body") == f"{path}: there is no column 'body', only id, text; set data.text_field"
    assert message(path, text_field="id") == f"{path}: column 'id' must hold text, got int64"
    pq.write_table(pa.table({"text": ["a" * 50, "b" * 50]}), path, compression="none")
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    assert message(path).startswith(f"{path}, row group 0: cannot be read")
