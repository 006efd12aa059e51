"""A field of a form is found wherever it stands, and no form costs more than one pass."""

from __future__ import annotations

import random
from email.message import Message
from functools import partial

import pytest
from support.cpu_cost import assert_in_proportion
from support.seeds import test_seed

from kvscout_common.errors import InvalidArgument
from kvscout_gateway.fronts import multipart
from kvscout_gateway.fronts.multipart import MAX_PARTS, field_of_form

FORM = "multipart/form-data; boundary=b"


def part(name: str, content: bytes, *, headers: bytes = b"", boundary: bytes = b"b") -> bytes:
    named = b'Content-Disposition: form-data; name="' + name.encode() + b'"'
    return b"--" + boundary + b"\r\n" + named + b"\r\n" + headers + b"\r\n" + content + b"\r\n"


def form(*parts: bytes, boundary: bytes = b"b") -> bytes:
    return b"".join(parts) + b"--" + boundary + b"--\r\n"


def read(content_type: str, body: bytes) -> str | None:
    try:
        return field_of_form(content_type, body, "model")
    except InvalidArgument:
        return None


def test_a_field_is_found_before_and_behind_a_file() -> None:
    file = part("file", bytes(range(256)) * 9000, headers=b"Content-Type: audio/wav\r\n")
    for parts in ((part("model", b"m"), file), (file, part("model", b"m"))):
        assert field_of_form(FORM, form(*parts), "model") == "m"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (form(part("file", b"x")), None),
        (form(part("model", b"")), ""),
        (form(part("model", "mödel".encode(), headers=b"Content-Type: text/plain; charset=utf-8\r\n")), "mödel"),
        (form(part("model", b"a\r\nb")), "a\r\nb"),
        (b"--b\r\n\r\nno headers\r\n" + form(part("model", b"m")), "m"),
        (b"--b \t\r\ncontent-disposition:form-data;name=model\r\n\r\nm\r\n--b--", "m"),
        (b'--b\r\nContent-Disposition: form-data; filename="; name=\\"no\\""; name="model"\r\n\r\nm\r\n--b--', "m"),
        (b"a preamble\r\n" + form(part("model", b"m")) + b"--b\r\n an epilogue", "m"),
        (form(part("file", part("model", b"inner", boundary=b"c")), part("model", b"m")), "m"),
        (form(part("file", b"\r\n--bc\r\n\r\n--b x\r\n\r"), part("model", b"m")), "m"),
    ],
)
def test_forms_are_read_as_engines_read_them(body: bytes, value: str | None) -> None:
    assert field_of_form(FORM, body, "model") == value


def test_the_boundary_may_be_quoted() -> None:
    body = form(part("model", b"m", boundary=b"a b;="), boundary=b"a b;=")
    assert field_of_form('multipart/form-data; charset=utf-8; Boundary="a b;="', body, "model") == "m"


@pytest.mark.parametrize(
    ("content_type", "body", "field"),
    [
        ("multipart/form-data", form(part("model", b"m")), "content-type"),
        ("multipart/form-data; boundary=", form(part("model", b"m")), "content-type"),
        ("multipart/form-data; boundary=" + "b" * 71, form(part("model", b"m")), "content-type"),
        ("multipart/form-data; boundary=é", form(part("model", b"m")), "content-type"),
        (FORM, b"no form", "body"),
        (FORM, part("model", b"m"), "body"),
        (FORM, b"--b\r\nname: x\r\n", "body"),
        (FORM, form(part("a", b"b", headers=b"X: " + b"x" * multipart.MAX_PART_HEADERS_BYTES + b"\r\n")), "body"),
        (FORM, form(*[part("a", b"b")] * (MAX_PARTS + 1)), "body"),
        (FORM, form(part("file", b"\r\n--bc" * MAX_PARTS)), "body"),
        (FORM, form(part("model", b"m"), part("file", b"x"), part("model", b"m")), "model"),
        (FORM, form(part("model", b"m" * (multipart.MAX_VALUE_BYTES + 1))), "model"),
        (FORM, form(part("model", b"\xff")), "model"),
    ],
)
def test_what_is_no_form_or_is_beyond_a_bound_is_refused_by_name(content_type: str, body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        field_of_form(content_type, body, "model")
    assert raised.value.field == field


def test_a_thousand_parts_are_read() -> None:
    parts = [part(f"file{at}", b"x") for at in range(MAX_PARTS - 1)]
    assert field_of_form(FORM, form(*parts, part("model", b"m")), "model") == "m"


def test_a_boundary_is_found_where_two_slices_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "_SLICE_BYTES", 16)
    for length in range(60):
        assert field_of_form(FORM, form(part("file", b"x" * length), part("model", b"m")), "model") == "m"


def test_random_forms_are_read_back() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    for _ in range(300):
        names = [f"f{at}" for at in range(draw.randrange(6))] + ["model"]
        draw.shuffle(names)
        model = "".join(draw.choices("abc/-\r\n", k=draw.randrange(9)))
        contents = {name: bytes(draw.choices(b"\r\n-bx", k=draw.randrange(40))) for name in names}
        contents["model"] = model.encode()
        if any(b"\r\n--b" in content for content in contents.values()):
            continue
        assert field_of_form(FORM, form(*(part(name, contents[name]) for name in names)), "model") == model


DASHES = "multipart/form-data; boundary=" + "-" * 70


@pytest.mark.parametrize(
    ("content_type", "unit"),
    [
        (FORM, b'name="model"\r\n'),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="model"\r\n'),
        (FORM, b"\r\n--b\r\n\r\n"),
        (FORM, b"\r\n--bc"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="model' + b"\\"),
        (DASHES, b"-"),
        (DASHES, b"\r\n--" + b"-" * 69),
    ],
)
def test_four_times_the_form_costs_no_more_than_in_proportion(content_type: str, unit: bytes) -> None:
    small, large = (unit * (size // len(unit)) for size in (2_000_000, 8_000_000))
    assert_in_proportion(partial(read, content_type), small, large)


def test_four_times_the_header_costs_no_more_than_in_proportion() -> None:
    for unit in ("; a=b", "; a", ' ;\t"', '; a="\\', "; boundary=", " \t", "="):
        small, large = (FORM + unit * size for size in (100_000, 400_000))
        assert_in_proportion(partial(read, body=b""), small, large, unit)


def engine_s_name(disposition: str) -> str:
    """The name of a part's field as engines' parser has it (python-multipart: the standard library's for mail)."""
    message = Message()
    message["content-type"] = disposition
    parameters = dict((message.get_params() or [])[1:])
    name: str | tuple[str, ...] = parameters.get("name", "")
    return name if isinstance(name, str) else name[-1]


HIDDEN = (
    'form-data; name="model"; name="rid"', "form-data; name*=utf-8''rid", 'form-data; name*0="r"; name*1="id"',
    'form-data; foo; name="rid"', "form-data; name=<rid>", 'form-data; a=b c; name="rid"', "form-data;; name=rid",
    'form"-data; name="model"; x="; name=rid; y="', 'form-data; x="a\\\\"; name="model"; y="; name=rid; z="',
    "form-data; \xa0name=rid", "form-data; \x0bname=rid", "form-data; name=\x0brid", "form-data;\n name=rid",
)  # fmt: skip


@pytest.mark.parametrize("disposition", HIDDEN)
def test_a_name_that_engines_read_otherwise_is_refused(disposition: str) -> None:
    body = b"--b\r\nContent-Disposition: " + disposition.encode("latin-1") + b"\r\n\r\nx\r\n--b--\r\n"
    with pytest.raises(InvalidArgument):
        field_of_form(FORM, body, "model", refused={"rid"})


def test_no_name_hides_from_us_what_engines_read() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    chunks = ('"', '"', ";", "; ", "=", "\\", "<", ">", "*", "*0", "\xa0", "\t", " ", "x", "name", "name=", "rid",
              '; name="rid"', "; name=rid", "form-data", '; x="', "''", "utf-8")  # fmt: skip
    hidden = 0
    for _ in range(20_000):
        disposition = "form-data" * draw.randrange(2) + "".join(draw.choices(chunks, k=draw.randrange(1, 9)))
        try:
            name = engine_s_name(disposition)
        except (ValueError, TypeError):  # the latter of `name*` beside `name*0`, which Python's parser cannot sort
            continue  # it is an error there
        if name != "rid":
            continue
        hidden += 1
        body = b"--b\r\nContent-Disposition: " + disposition.encode("latin-1") + b"\r\n\r\nx\r\n--b--\r\n"
        with pytest.raises(InvalidArgument):
            field_of_form(FORM, body, "model", refused={"rid"})
    assert hidden > 100


@pytest.mark.parametrize("kind", [
    "multipart/form-data; boundary=a; boundary=b", "multipart/form-data; boundary=a,multipart/form-data; boundary=b",
    "multipart/form-data; boundary=a; boundary*=utf-8''b", 'multipart/form-data; boundary=a; x; boundary="b"',
])  # fmt: skip
def test_a_content_type_names_one_boundary(kind: str) -> None:
    # An engine that goes by the last one sees what is the preamble of the first.
    body = form(part("rid", b"x")) + b"\r\n" + form(part("model", b"m", boundary=b"a"), boundary=b"a")
    with pytest.raises(InvalidArgument) as raised:
        field_of_form(kind, body, "model", refused={"rid"})
    assert raised.value.field == "content-type"


def test_a_part_has_one_disposition() -> None:
    body = form(part("model", b"m", headers=b'Content-Disposition: form-data; name="rid"\r\n'))
    with pytest.raises(InvalidArgument):
        field_of_form(FORM, body, "model", refused={"rid"})


@pytest.mark.parametrize(
    "filename",
    [
        b'"a;b.wav"',
        b'"a \\"b\\".wav"',
        '"àé\u3042.wav"'.encode(),
        b"a.wav",
        b"\"a.wav\"; filename*=utf-8''%c3%a4.wav",
        b'"a.wav";',
    ],
)
def test_names_of_files_are_no_matter(filename: bytes) -> None:
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename=' + filename + b"\r\n\r\nx\r\n"
    assert field_of_form(FORM, file + form(part("model", b"m")), "model", refused={"rid"}) == "m"
