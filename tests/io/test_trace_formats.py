"""Every trace format: rows as its publisher means them, whatever is wrong told by its line."""

from __future__ import annotations

import ast
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from rtp.core.errors import ConfigError
from rtp.core.trace import TraceRow
from rtp.io import traces
from rtp.io.traces import native, write_mooncake
from tests.support.tokenizers import CHATML, byte_level_json
from tests.support.traces import found
from traces.generate import FOLDER, SAMPLES

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
FORMAT = {
    "sample_conversation.jsonl.gz": "mooncake",
    "sample_bailian.jsonl.gz": "bailian",
    "sample_azure.csv": "azure",
    "sample_burstgpt.csv": "burstgpt",
    "sample_weka.jsonl.gz": "weka",
    "sample_servegen.tar.gz": "servegen",
    "sample_text.jsonl": "text",
}


def a_file(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_what_its_generator_makes_and_small(name: str, tmp_path: Path):
    SAMPLES[name](tmp_path / name)
    kept, made = (FOLDER / name).read_bytes(), (tmp_path / name).read_bytes()
    if name.endswith(".gz"):
        kept, made = gzip.decompress(kept), gzip.decompress(made)
    assert kept == made
    assert (FOLDER / name).stat().st_size < 100_000


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_known_by_its_look_and_has_rows_in_order(name: str, tmp_path: Path):
    options = {"tokenizer": str(a_tokenizer(tmp_path))} if name == "sample_text.jsonl" else {}
    trace = traces.read(FOLDER / name, **options)
    assert trace.format == FORMAT[name]
    assert trace.rows[0].arrival_s == 0.0
    assert [row.arrival_s for row in trace.rows] == sorted(row.arrival_s for row in trace.rows)
    assert all(row.after < index for index, row in enumerate(trace.rows))
    assert not trace.bad or trace.format == "burstgpt"
    parents: dict[int, int] = {}
    for row in trace.rows:
        assert len(row.block_ids) >= row.num_tokens // trace.block_size
        for parent, block in zip((-1, *row.block_ids), row.block_ids, strict=False):
            assert parents.setdefault(block, parent) == parent


# ---------------------------------------------------------------- looking at files


def test_a_file_of_no_format_is_an_error_that_lists_them(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not a trace of a known format .*mooncake"):
        traces.read(a_file(tmp_path, "x.txt", "hello"))
    with pytest.raises(ConfigError, match="no trace format 'nope'"):
        traces.read(FOLDER / "sample_azure.csv", "nope")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"blocks": 3}, "no option 'blocks'; it has block_size"),
        ({"block_size": 0}, "block_size of trace format azure"),
        ({"block_size": "many"}, "block_size of trace format azure"),
    ],
)
def test_options_that_no_reader_takes_are_errors(options: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        traces.read(FOLDER / "sample_azure.csv", **options)


def test_every_option_of_every_format_is_explained():
    for format in traces.FORMATS:
        assert all(len(text) > 20 for text in traces.options_of(format).values())


def test_a_damaged_archive_or_gzip_file_is_an_error_with_its_name(tmp_path: Path):
    for name in ("x.jsonl.gz", "x.tar.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"timestamp": 1}' * 99)[:-12])
        with pytest.raises(ConfigError, match=name):
            traces.read(tmp_path / name)


# ---------------------------------------------------------------- Azure, BurstGPT


def test_t01_azure_times_of_day_count_from_the_first_to_100_ns(tmp_path: Path):
    path = a_file(
        tmp_path,
        "azure.csv",
        AZURE + "\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109\r",
    )
    rows = traces.read(path).rows
    assert rows[1].arrival_s == pytest.approx(4.314579, abs=1e-9)
    assert [(row.num_tokens, row.num_output) for row in rows] == [(374, 44), (396, 109)]


def test_t01_azure_offsets_from_utc_are_minded(tmp_path: Path):
    path = a_file(
        tmp_path,
        "azure.csv",
        AZURE,
        "2024-05-10 00:00:00.009930+00:00,10,5",
        "2024-05-10 02:00:01.009930+02:00,20,5",
        "2024-05-10 00:00:02.009930Z,30,5",
    )
    rows = traces.read(path).rows
    assert [row.arrival_s for row in rows] == [0.0, 1.0, 2.0]


def test_t11_azure_lines_that_are_no_request_are_told(tmp_path: Path):
    path = a_file(
        tmp_path,
        "azure.csv",
        "\ufeff" + AZURE,
        "2023-11-16 18:15:46.68,374,44",
        "",
        "yesterday,374,44",
        "2023-11-16 18:15:47.0,0,44",
        "2023-11-16 18:15:47.0,many,44",
        "2023-11-16 18:15:47.0,374",
        "2023-11-16 18:15:48.0,17,1",
    )
    trace = traces.read(path, block_size=16)
    assert [row.block_ids for row in trace.rows] == [tuple(range(24)), (24, 25)]
    assert [bad.line for bad in trace.bad] == [4, 5, 6, 7]
    assert trace.num_blank == 1
    assert "'yesterday' is no time" in trace.bad[0].reason


def test_a_header_without_a_needed_column_is_an_error(tmp_path: Path):
    path = a_file(tmp_path, "azure.csv", "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46.68,374")
    with pytest.raises(ConfigError, match="no column GeneratedTokens in the header"):
        traces.read(path, "azure")


def test_t03_burstgpt_whole_seconds_keep_the_order_and_failures_are_told(tmp_path: Path):
    path = a_file(
        tmp_path,
        "burst.csv",
        BURST,
        "5,ChatGPT,472,18,490,Conversation log",
        "5,ChatGPT,10,20,30,API log",
        "5,GPT-4,30,0,30,API log",
        "7,GPT-4,50,1,51,API log",
    )
    trace = traces.read(path)
    assert [(row.arrival_s, row.num_tokens) for row in trace.rows] == [(0, 472), (0, 10), (2, 50)]
    assert [(bad.line, bad.reason.split(":")[0]) for bad in trace.bad] == [
        (4, "failed when it was recorded")
    ]
    assert all(row.session == -1 for row in trace.rows)


def test_a_burstgpt_turn_waits_for_the_answer_before_it_where_it_came_after_it(tmp_path: Path):
    path = a_file(
        tmp_path,
        "burst.csv",
        BURST_3,
        "10,a,4.5,GPT-4,100,10,110",
        "12,b,1.0,GPT-4,100,10,110",
        "20,a,3.0,GPT-4,120,10,130",
        "22,a,1.0,GPT-4,130,10,140",
        "30,,,GPT-4,50,10,60",
    )
    rows = traces.read(path).rows
    assert [row.session for row in rows] == [0, 1, 0, 0, -1]
    assert [row.after for row in rows] == [-1, -1, 0, -1, -1]  # the fourth came before an answer
    assert rows[2].think_s == 5.5


# ---------------------------------------------------------------- Bailian


def bailian(chat: int, parent: int, at: float, tokens: int, *ids: int) -> str:
    return json.dumps(
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": tokens,
            "output_length": 5,
            "type": "text",
            "turn": 1,
            "hash_ids": ids,
        }
    )


def test_bailian_blocks_of_equal_content_behind_other_prefixes_are_told_apart(tmp_path: Path):
    path = a_file(
        tmp_path,
        "b.jsonl",
        bailian(0, -1, 0.0, 48, 1, 2, 3),
        bailian(1, 0, 1.5, 64, 1, 2, 3, 4),
        bailian(2, -1, 2.0, 48, 5, 2, 3),
        bailian(3, 2, 3.0, 48, 5, 2, 3),
    )
    trace = traces.read(path)
    ids = [row.block_ids for row in trace.rows]
    assert ids[0] == (1, 2, 3)
    assert ids[1] == (1, 2, 3, 4)
    assert ids[2] == ids[3]
    assert ids[2][0] == 5
    assert not {*ids[2][1:]} & {1, 2, 3, 4, 5}
    assert trace.num_renamed == 2
    assert [row.session for row in trace.rows] == [0, 0, 1, 1]
    assert [row.arrival_s for row in trace.rows] == [0.0, 1.5, 2.0, 3.0]


def test_t04_bailian_rows_may_number_a_partly_filled_block_or_not(tmp_path: Path):
    lines = [bailian(i, -1, i, 40, *range(10 * i, 10 * i + n)) for i, n in enumerate((2, 3, 4))]
    trace = traces.read(a_file(tmp_path, "b.jsonl", *lines))
    assert len(trace.rows) == 2
    assert [bad.line for bad in trace.bad] == [3]


# ---------------------------------------------------------------- WEKA


def request(t: float, tokens: int, api: float, think: float | None, first: int = 0) -> dict:
    return {
        "t": t,
        "type": "n",
        "in": tokens,
        "out": 7,
        "hash_ids": [first + i for i in range(tokens // 64)],
        "api_time": api,
        "think_time": think,
    }


def weka(folder: Path, *sessions: list[dict]) -> Path:
    lines = [
        json.dumps(
            {"id": f"s{i}", "block_size": 64, "hash_id_scope": "local", "requests": requests}
        )
        for i, requests in enumerate(sessions)
    ]
    return a_file(folder, "w.jsonl", *lines)


def test_an_agent_waits_for_its_answers_and_thinks_as_long_as_recorded(tmp_path: Path):
    path = weka(tmp_path, [request(0, 640, 4.0, 0.0), request(10, 900, 2.0, 5.5, 0)])
    trace = traces.read(path)
    assert [(row.arrival_s, row.after, row.think_s) for row in trace.rows] == [
        (0.0, -1, 0.0),
        (10.0, 0, 5.5),
    ]
    assert trace.rows[1].block_ids[:10] == trace.rows[0].block_ids
    assert (trace.block_size, trace.rows[0].tenant) == (64, "s0")


def test_sub_agents_start_behind_their_parent_and_it_waits_for_the_last_to_end(tmp_path: Path):
    short = {"t": 6.0, "type": "subagent", "requests": [request(0, 64, 1.0, 0.0, 50)]}
    long = {
        "t": 7.0,
        "type": "subagent",
        "requests": [request(0, 64, 2.0, 0.0, 60), request(5, 128, 3.0, 3.0, 60)],
    }
    late = {"t": 8.0, "type": "subagent", "requests": [request(0, 64, 99.0, 0.0, 70)]}
    path = weka(
        tmp_path, [request(0, 640, 4.0, 0.0), short, long, late, request(20, 700, 2.0, 16.0)]
    )
    rows = traces.read(path).rows
    assert [(row.arrival_s, row.after, row.think_s) for row in rows] == [
        (0.0, -1, 0.0),  # the parent, until 4
        (6.0, 0, 2.0),  # short, until 7
        (7.0, 0, 3.0),  # long, until 9
        (8.0, 0, 4.0),  # late, until 107
        (12.0, 2, 3.0),  # long again, until 15
        (20.0, 4, 5.0),  # the parent, behind long, which of those at an end ended last
    ]
    assert [row.session for row in rows] == [0, 1, 2, 3, 2, 0]


def test_sessions_share_no_block_and_start_apart_by_seed(tmp_path: Path):
    path = weka(tmp_path, *[[request(0, 640, 1.0, 0.0)] * (i != 2) for i in range(6)])
    rows = traces.read(path, gap_s=60.0, seed=3).rows
    assert len({block for row in rows for block in row.block_ids}) == 5 * 10
    assert rows == traces.read(path, gap_s=60.0, seed=3).rows
    assert rows != traces.read(path, gap_s=60.0, seed=4).rows
    assert {row.arrival_s for row in traces.read(path, gap_s=0.0).rows} == {0.0}


def test_long_thoughts_can_be_cut_and_all_behind_them_comes_earlier(tmp_path: Path):
    path = weka(
        tmp_path,
        [request(0, 64, 1, 0), request(9001, 64, 1, 9000), request(9005, 64, 1, 3)],
    )
    rows = traces.read(path, most_think_s=60.0).rows
    assert [(row.arrival_s, row.think_s) for row in rows] == [(0, 0), (61, 60), (65, 3)]


def test_a_recorded_thought_longer_than_its_gap_moves_no_row_before_what_it_waits_for(
    tmp_path: Path,
):
    path = weka(tmp_path, [request(0, 64, 1, 0), request(50, 64, 1, 7000), request(60, 64, 1, 9)])
    rows = traces.read(path, most_think_s=60.0).rows
    assert [(row.arrival_s, row.after) for row in rows] == [(0, -1), (50, 0), (60, 1)]


def test_t11_a_bad_request_of_a_session_is_told_and_the_next_waits_for_the_last_good(
    tmp_path: Path,
):
    broken = request(5, 640, 1.0, 2.0) | {"out": 0}
    short = request(6, 640, 1.0, 2.0) | {"hash_ids": [1]}
    path = weka(tmp_path, [request(0, 640, 1, 0), broken, short, request(9, 640, 1, 2.0)])
    with path.open("a") as file:
        file.write("\n{}\n")
    trace = traces.read(path)
    assert [(row.arrival_s, row.after) for row in trace.rows] == [(0.0, -1), (9.0, 0)]
    assert [bad.line for bad in trace.bad] == [1, 1, 3]
    assert "request 2 of s0" in trace.bad[0].reason
    assert trace.num_blank == 1


@pytest.mark.slow
def test_the_weka_sessions_are_read_whole():
    trace = traces.read(found("weka_agentic_coding_103.jsonl.gz"))
    assert len(trace.rows) + len(trace.bad) == 5070
    assert len({row.tenant for row in trace.rows}) == 103
    assert len({row.session for row in trace.rows}) == 103 + 4
    assert len({block for row in trace.rows for block in row.block_ids}) > 380_000


# ---------------------------------------------------------------- ServeGen


def clients(folder: Path, **windows: list[str]) -> Path:
    """A tar of clients; each with lengths 100 and 10 in span 0, and 200 and 20 in span 21600."""
    path = folder / "clients.tar.gz"
    spans = {
        str(start): {
            "input_tokens": f"{{{scale * 100}: 1.0}}",
            "output_tokens": f"{{{scale * 10}: 1.0}}",
            "reason_ratio": "{}",
        }
        for start, scale in ((0, 1), (21_600, 2))
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, lines in windows.items():
            for suffix, text in (("trace.csv", "\n".join(lines)), ("dataset.json", spans)):
                content = (text if isinstance(text, str) else json.dumps(text)).encode()
                member = tarfile.TarInfo(f"data/{name}-{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("family", ["Gamma,0.25,9", "Weibull,0.6,9", ",0,0"])
def test_a_client_sends_at_the_rate_and_burstiness_of_its_windows(tmp_path: Path, family: str):
    windows = [f"{600 * i},{0.5 if i < 6 else 4.0},2.0,{family}" for i in range(12)]
    rows = traces.read(clients(tmp_path, c=windows), seconds=7200.0).rows
    slow = sum(row.arrival_s < 3600 for row in rows)
    assert slow == pytest.approx(1800, rel=0.15)
    assert len(rows) - slow == pytest.approx(14_400, rel=0.06)
    assert {(row.num_tokens, row.num_output) for row in rows} == {(100, 10)}


def test_servegen_draws_the_same_for_a_seed_and_leaves_other_clients_alone(tmp_path: Path):
    window = ["0,1.0,1.0,Gamma,1.0,1.0"]
    both = clients(tmp_path, a=window, b=["0,2.0,1.0,Gamma,1.0,1.0"])
    rows = traces.read(both, seed=5, seconds=600.0).rows
    assert rows == traces.read(both, seed=5, seconds=600.0).rows
    assert rows != traces.read(both, seed=6, seconds=600.0).rows
    # The first arrival of all is at 0: compare the gaps of b.
    alone = traces.read(both, seed=5, seconds=600.0, clients=1).rows
    times = [row.arrival_s for row in rows if row.tenant == "b"]
    assert [t - times[0] for t in times] == pytest.approx([row.arrival_s for row in alone])


def test_servegen_lengths_follow_the_span_and_the_rate_can_be_set(tmp_path: Path):
    windows = [f"{600 * i},1.0,1.0,Gamma,1.0,1.0" for i in range(72)]
    path = clients(tmp_path, c=windows)
    late = traces.read(path, start_s=22_200.0, seconds=1800.0, rate=3.0)
    assert {(row.num_tokens, row.num_output) for row in late.rows} == {(200, 20)}
    assert len(late.rows) == pytest.approx(5400, rel=0.1)
    with pytest.raises(ConfigError, match="no client sends anything"):
        traces.read(path, start_s=1e6)


def test_t11_servegen_windows_and_clients_that_cannot_be_used_are_told(tmp_path: Path):
    path = clients(tmp_path, c=["0,1.0,1.0,Gamma,1.0,1.0", "600,x,1,,0,0", "1200,1,1,Zipf,1,1"])
    trace = traces.read(path)
    assert [bad.line for bad in trace.bad] == [2, 3]
    assert "no number" in trace.bad[0].reason
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "d-trace.csv").write_text("0,1.0,1.0,Gamma,1.0,1.0\n")
    assert "has no lengths" in traces.read(folder).bad[0].reason
    assert len(traces.read(folder, lengths=str(path)).rows) > 400


def recorded(path: Path) -> tuple[float, float, float]:
    """Requests a second of a ServeGen archive over a day, and mean tokens in and out, counted
    window by window."""
    rates: dict[tuple[str, int], float] = {}
    means: dict[tuple[str, int], tuple[float, float]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            client, _, kind = Path(member.name).name.rpartition("-")
            file = archive.extractfile(member)
            if kind == "trace.csv":
                for line in file.read().decode().split():
                    start, rate, *_ = line.split(",")
                    span = int(start) // 21_600 * 21_600
                    rates[client, span] = rates.get((client, span), 0.0) + float(rate) / 144
            elif kind == "dataset.json":
                for start, maps in json.load(file).items():
                    both = [ast.literal_eval(maps[f"{way}_tokens"]) for way in ("input", "output")]
                    if all(both):
                        mean_in, mean_out = (sum(v * p for v, p in m.items()) for m in both)
                        means[client, int(start)] = mean_in, mean_out
    total = sum(rates.values())
    tokens = [sum(r * means[k][way] for k, r in rates.items() if r) / total for way in (0, 1)]
    return total, tokens[0], tokens[1]


@pytest.mark.slow
def test_the_deepseek_clients_give_their_recorded_load():
    path = found("servegen_deepseek-r1_clients.tar.gz")
    rate, tokens_in, tokens_out = recorded(path)
    rows = traces.read(path, seconds=86_400.0, rate=0.5).rows
    assert len(rows) == pytest.approx(43_200, rel=0.03)
    assert sum(row.num_tokens for row in rows) / len(rows) == pytest.approx(tokens_in, rel=0.03)
    assert sum(row.num_output for row in rows) / len(rows) == pytest.approx(tokens_out, rel=0.03)
    hour = traces.read(path, start_s=43_200.0, clients=3).rows
    assert 0 < len(hour) < 3600 * rate


# ---------------------------------------------------------------- text


def a_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(byte_level_json())
    if template is not None:
        config = {"chat_template": template, "bos_token": {"content": "<|bos|>"}}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def test_prompts_as_text_share_the_blocks_of_equal_beginnings(tmp_path: Path):
    head = "the quick brown fox jumps over the lazy dog. " * 4
    path = a_file(
        tmp_path,
        "t.jsonl",
        json.dumps({"timestamp": 1000, "prompt": head + "What is it?", "max_tokens": 9}),
        json.dumps({"timestamp": 1500, "text": head + "Who is it?", "output": "the dog"}),
        json.dumps({"timestamp": 2500, "prompt": head + "What is it?"}),
    )
    trace = traces.read(path, tokenizer=str(a_tokenizer(tmp_path)), block_size=8)
    first, other, again = (row.block_ids for row in trace.rows)
    assert [row.arrival_s for row in trace.rows] == [0.0, 0.5, 1.5]
    assert first == again
    shared = sum(a == b for a, b in zip(first, other, strict=False))
    assert 4 < shared < len(other)
    assert not {*first[shared:]} & {*other[shared:]}
    assert trace.rows[0].num_output == 9
    assert 0 < trace.rows[1].num_output < 8
    assert len(first) == -(-trace.rows[0].num_tokens // 8)


def test_messages_go_through_the_models_template_and_times_are_drawn(tmp_path: Path):
    turn = {"role": "user", "content": "What is the capital of France?"}
    path = a_file(
        tmp_path,
        "t.jsonl",
        json.dumps({"messages": [turn], "chat_id": "a"}),
        json.dumps({"messages": [turn, turn], "chat_id": "a", "tenant": "x"}),
        json.dumps({"messages": [turn], "chat_id": 7}),
    )
    model = a_tokenizer(tmp_path)
    rows = traces.read(path, tokenizer=str(model), rate=2.0, output=33, seed=1).rows
    assert [row.session for row in rows] == [0, 0, 1]
    assert [row.num_output for row in rows] == [33, 33, 33]
    assert rows[1].tenant == "x"
    assert rows[1].num_tokens > rows[0].num_tokens
    assert rows[1].arrival_s > rows[0].arrival_s == 0.0
    assert rows == traces.read(path, tokenizer=str(model), rate=2.0, output=33, seed=1).rows
    (model / "tokenizer_config.json").unlink()
    bad = traces.read(path, tokenizer=str(model)).bad
    assert [b.reason for b in bad] == ["messages, but no chat template beside the tokenizer"] * 3


def test_text_without_a_tokenizer_is_an_error_that_says_so(tmp_path: Path):
    path = a_file(tmp_path, "t.jsonl", '{"prompt": "hello"}')
    with pytest.raises(ConfigError, match="need a tokenizer"):
        traces.read(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        traces.read(path, tokenizer=str(tmp_path))


# ---------------------------------------------------------------- rtp's own, and Mooncake's


def test_rtps_own_files_keep_everything(tmp_path: Path):
    rows = [
        TraceRow(0.0, 70, 3, (0,), session=4, tenant="a"),
        TraceRow(1 / 3, 65, 2, (0, 9), session=4, after=0, think_s=0.1 + 0.2, tenant="a"),
        TraceRow(2.5, 64, 1, (7,)),
    ]
    for name in ("t.jsonl", "t.jsonl.gz"):
        native.write(tmp_path / name, rows, 64)
        trace = traces.read(tmp_path / name)
        assert (trace.rows, trace.block_size, trace.format, trace.bad) == (rows, 64, "rtp", [])


def test_t04_rows_of_rtps_own_files_that_cannot_be_are_told(tmp_path: Path):
    path = a_file(
        tmp_path,
        "t.jsonl",
        '{"rtp_trace": 1, "block_size": 64}',
        '{"arrival_s": 0, "num_tokens": 64, "num_output": 1, "block_ids": [0]}',
        '{"arrival_s": 1, "num_tokens": 128, "num_output": 1, "block_ids": [0]}',
        '{"arrival_s": 2, "num_tokens": 64, "num_output": 1, "block_ids": [0], "after": 3}',
        '{"arrival_s": 3, "num_tokens": 64, "num_output": 1, "block_ids": [0], "after": 0}',
    )
    trace = traces.read(path)
    assert [row.after for row in trace.rows] == [-1, 0]
    assert [bad.line for bad in trace.bad] == [3, 4]
    for first in ('{"rtp_trace": 9, "block_size": 64}', '{"rtp_trace": 1, "block_size": 0}'):
        with pytest.raises(ConfigError, match="this rtp reads version 1"):
            traces.read(a_file(tmp_path, "u.jsonl", first))


def test_whole_blocks_alone_get_a_number_for_the_rest_in_mooncakes_form(tmp_path: Path):
    rows = [TraceRow(0.0, 100, 3, (5,)), TraceRow(1.0, 128, 2, (5, 6)), TraceRow(2.0, 30, 2, ())]
    write_mooncake(tmp_path / "m.jsonl", rows, 64)
    trace = traces.read(tmp_path / "m.jsonl", block_size=64)
    assert [row.block_ids for row in trace.rows] == [(5, 7), (5, 6), (8,)]
    assert trace.bad == []


def test_t06_every_row_of_the_azure_trace_is_there_once():
    trace = traces.read(found("azure_2023_conv.csv"))
    assert (len(trace.rows), trace.bad, trace.num_blank) == (19_366, [], 0)
    assert trace.rows[-1].arrival_s == pytest.approx(3501.7, abs=0.1)
