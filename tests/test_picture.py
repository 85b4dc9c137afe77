"""The recording of a terminal: what is kept of it shows the same screens, and what is drawn of it is a picture."""

from __future__ import annotations

from xml.etree import ElementTree

from docs import picture

TAKEN_BACK = "\r\x1b[2K" + 2 * "\x1b[1A\x1b[2K"
"""Of a live picture of three lines, as rich writes it."""


def live(*figures: int) -> str:
    return TAKEN_BACK.join(f"┌─\n│ \x1b[32m{figure}\x1b[0m\n└─" for figure in figures)


def chunks() -> list[picture.Chunk]:
    figures = [(at, f"{TAKEN_BACK}{live(at)}") for at in range(1, 12)]
    told = TAKEN_BACK + "one line above it all\n" + live(12)
    return [
        (0.0, f"$ make demo\r\n{live(0)}"),
        *((0.2 * at, text) for at, text in figures),
        (2.4, told),
        (9.0, "\ndown\n"),
    ]


def screens(kept: list[picture.Chunk]) -> list[str]:
    written, found = "", []
    for _, text in kept:
        written = picture.shown(written + text)
        found.append(written)
    return found


def test_less_is_kept_and_the_same_is_seen() -> None:
    every = picture.merged(chunks(), 1.0)
    kept = [(at, picture.untaken(text)) for at, text in every]
    assert screens(kept) == screens(every)
    assert sum(len(text) for _, text in kept) < 0.6 * sum(len(text) for _, text in every)
    assert screens(kept)[-1].splitlines()[1:3] == ["one line above it all", "┌─"]


def test_a_character_that_is_cut_waits_for_its_rest() -> None:
    data = "│".encode()
    assert picture.whole_characters(b"a" + data[:1]) == ("a", data[:1])
    assert picture.whole_characters(data) == ("│", b"")


def test_the_film_is_a_picture_whose_last_frame_stays() -> None:
    film = picture.frames(chunks())
    drawn = ElementTree.fromstring(picture.drawn(film))
    texts = ["".join(element.itertext()) for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-1] == "down"
    assert 'fill="#6bc46d"' in picture.drawn(film)
    assert f"#f{len(film) - 1}{{visibility:visible}}" in picture.drawn(film)
