"""Text of a choice: stop strings with exact hold-back, tokens released with their text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rtp.core.frontend.stops import StopStrings
from rtp.core.frontend.text import ChoiceText, Released
from rtp.core.steps import TokenLogprobs


class Pieces:
    """A Detokenizer whose token i shows pieces[i]; '' stands for an incomplete character."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces = pieces
        self.tail = tail

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.tail


def a_text(
    pieces: list[str], stops: tuple[str, ...] = (), tail: str = "", **options: object
) -> ChoiceText:
    automaton = StopStrings(stops) if stops else None
    return ChoiceText(Pieces(pieces, tail), automaton, **options)  # type: ignore[arg-type]


def run(text: ChoiceText, count: int) -> list[Released | None]:
    """Pushes tokens 0 .. count-1 until a stop, then finishes; what each step released."""
    seen: list[Released | None] = []
    for token in range(count):
        stopped = text.push(token)
        seen.append(text.take())
        if stopped:
            return seen
    text.finish()
    seen.append(text.take())
    return seen


def joined(seen: list[Released | None]) -> tuple[str, list[int]]:
    parts = [part for part in seen if part is not None]
    return "".join(part.text for part in parts), [i for part in parts for i in part.ids]


def test_s01_no_part_of_a_stop_is_shown_before_the_match_is_complete() -> None:
    seen = run(a_text(["DEF", "G", "HI", "J"], ("DEFGHIJ",)), 4)
    assert seen == [None, None, None, Released("", (0, 1, 2, 3), ())]


def test_s03_only_a_live_prefix_of_a_stop_is_held() -> None:
    text = a_text(["a\n", "b\n\n", "Obs", "e", "t\n"], ("\n\nObservation:",))
    assert run(text, 5) == [
        Released("a", (), ()),
        Released("\nb", (0,), ()),
        None,
        None,
        Released("\n\nObset", (1, 2, 3), ()),
        Released("\n", (4,), ()),
    ]


def test_text_without_a_stop_character_is_never_held() -> None:
    seen = run(a_text(["one", " two", " three"], ("zzz", "END")), 3)
    assert [part.text if part else None for part in seen] == ["one", " two", " three", None]


def test_s04_the_stop_string_is_shown_only_when_asked_for() -> None:
    for include, expected in ((False, "x"), (True, "xSTOP")):
        text = a_text(["xS", "TO", "Py", "z"], ("STOP",), include_stop=include)
        seen = run(text, 4)
        assert joined(seen) == (expected, [0, 1, 2])
        assert text.stop == "STOP"


def test_the_stop_that_is_complete_first_wins_then_the_longest() -> None:
    assert joined(run(a_text(["abcd"], ("abcd", "bc")), 1))[0] == "a"
    assert joined(run(a_text(["abcd"], ("bc", "abc")), 1))[0] == ""
    assert joined(run(a_text(["a", "b", "x"], ("abx", "bx", "b")), 3))[0] == "a"


def test_s05_a_character_over_several_tokens_holds_its_tokens() -> None:
    seen = run(a_text(["a", "", "", "😀"]), 4)
    assert seen[:4] == [Released("a", (0,), ()), None, None, Released("😀", (1, 2, 3), ())]


def test_an_incomplete_character_at_the_end_is_flushed_with_its_token() -> None:
    assert run(a_text(["a", ""], tail="\ufffd"), 2)[-1] == Released("\ufffd", (1,), ())


def test_a_stop_completed_by_the_flush_counts() -> None:
    text = a_text(["a", ""], ("\ufffd",), tail="\ufffd")
    text.push(0)
    text.push(1)
    assert text.finish()
    assert text.take() == Released("a", (0, 1), ())


def test_logprobs_leave_with_their_tokens() -> None:
    text = a_text(["a", "S", "b"], ("ST",))
    values = [TokenLogprobs(i, -float(i)) for i in range(3)]
    for i in range(3):
        text.push(i, values[i])
    assert text.take() == Released("aSb", (0, 1, 2), tuple(values))


def test_a_silent_token_counts_and_shows_nothing() -> None:
    text = a_text(["a", "<end>"])
    text.push(0)
    text.push(1, silent=True)
    assert not text.finish()
    assert text.take() == Released("a", (0, 1), ())


def test_stops_before_min_tokens_do_not_count() -> None:
    pieces = ["ab", "ab", "a", "b", "c"]
    assert joined(run(a_text(pieces, ("ab",), min_tokens=3), 5)) == ("abab", [0, 1, 2, 3])
    assert joined(run(a_text(pieces, ("ab",), min_tokens=2), 5)) == ("ab", [0, 1])
    assert joined(run(a_text(pieces, ("ab", "abab"), min_tokens=9), 5))[0] == "abababc"


def first_stop(text: str, stops: list[str]) -> tuple[int, str]:
    """The oracle: end and name of the first complete stop; the longest of those ending together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return -1, ""


LETTERS = st.text("ab🙂", max_size=4)


@given(
    pieces=st.lists(LETTERS, max_size=12),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    taken=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_joined_stream_is_the_whole_text_up_to_the_first_stop(
    pieces: list[str], stops: list[str], include: bool, taken: list[bool]
) -> None:
    text = a_text(pieces, tuple(stops), include_stop=include)
    parts: list[Released | None] = []
    for token in range(len(pieces)):
        stopped = text.push(token)
        if taken[token]:
            parts.append(text.take())
        if stopped:
            break
    text.finish()
    parts.append(text.take())
    shown, ids = joined(parts)

    whole = "".join(pieces)
    end, stop = first_stop(whole, stops)
    if end < 0:
        assert (shown, ids, text.stop) == (whole, list(range(len(pieces))), "")
    else:
        lengths = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
        used = next(i for i, length in enumerate(lengths) if length >= end)
        assert shown == whole[: end if include else end - len(stop)]
        assert (ids, text.stop) == (list(range(used + 1)), stop)


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_exactly_the_longest_live_prefix_is_held(text: str, stops: list[str]) -> None:
    automaton = StopStrings(stops)
    scan = automaton.scan(0, text, armed=False)
    live = [
        n
        for stop in stops
        for n in range(1, len(stop))
        if text.endswith(stop[:n]) and n <= len(text)
    ]
    assert automaton.held(scan.state) == max(live, default=0)
