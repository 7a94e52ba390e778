"""Command lines with bad values: the start of a command, values for what comes next, and part of what is said.

A new row is one line, or one more value in a line.
"""

from __future__ import annotations

from tests.bad_inputs.rows import Row

MANY, NINES = "1" + "0" * 30, "9" * 5000
Line = tuple[str, list[str], str]


TABLE: list[Line] = [
    ("demo --haystack", ["no-such.txt", "folder"], "bland, hard, text or a text file is needed"),
    ("demo --haystack", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("demo --haystack", ["taken", "empty.txt"], "a haystack needs at least 100"),
    ("inspect", [""], "a name is needed"),
    ("inspect", ["no-such", "taken"], "is neither a shipped model"),
    ("inspect", ["odd"], "a whole number from 1 to"),
    ("inspect", ["empty"], "a model's folder or one of"),
    ("inspect", ["strange"], "names with values are needed"),
    ("inspect", ["deep"], "config.json is not JSON"),
    ("inspect bam-tiny --text", [""], "bundled, a file, a folder or hf:owner/name is needed"),
    ("inspect bam-tiny --text", ["no-such.txt"], "there is no file or folder no-such.txt"),
    ("inspect bam-tiny --text", ["empty"], "has no .txt"),
    ("inspect bam-tiny --text", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("inspect bam-tiny --text", ["deep.jsonl"], "is not JSON with a field"),
    ("inspect bam-tiny --text", ["number.jsonl"], "a text is needed"),
    ("inspect bam-tiny --text", ["taken", "empty.txt"], "posteriors are measured on 1,024"),
    ("inspect bam-tiny --tokenizer", [""], "a name is needed"),
    ("inspect bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("inspect bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("advise", [""], "a name is needed"),
    ("advise", ["no-such", "taken"], "is neither a shipped model"),
    ("advise", ["odd"], "a whole number from 1 to"),
    ("advise", ["empty"], "a model's folder or one of"),
    ("advise", ["strange"], "names with values are needed"),
    ("advise", ["deep"], "config.json is not JSON"),
    ("advise bam-tiny --delta", ["-1", "1e300"], "it must be at least 1e-6 and less than 2"),
    ("advise bam-tiny --text", [""], "bundled, a file, a folder or hf:owner/name is needed"),
    ("advise bam-tiny --text", ["no-such.txt"], "there is no file or folder no-such.txt"),
    ("advise bam-tiny --text", ["empty"], "has no .txt"),
    ("advise bam-tiny --text", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("advise bam-tiny --text", ["deep.jsonl"], "is not JSON with a field"),
    ("advise bam-tiny --text", ["number.jsonl"], "a text is needed"),
    ("advise bam-tiny --text", ["taken", "empty.txt"], "8,192 are needed"),
    ("advise bam-tiny --tokenizer", [""], "a name is needed"),
    ("advise bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("advise bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("report", ["no-such"], "there is no file or folder no-such"),
    ("report", ["empty", "folder"], "a file or folder that a study has written is needed"),
    ("report", ["taken", "empty.txt", "bytes.txt", "nested.json"], "is not a file of results: it is not JSON"),
    ("report", ["nan.json"], "a text is needed"),
    ("compare good.json", ["no-such"], "no-such cannot be read: No such file or directory"),
    ("compare good.json", ["taken", "empty.txt"], "is not a file of results: it is not JSON"),
    ("compare good.json", ["folder"], "folder cannot be read: Is a directory"),
    ("savings --json", ["taken", "bytes.txt"], "so it is not replaced; another file is needed"),
    ("savings --model", ["", "no-such", "empty"], "there are llama-2-7b"),
    ("savings --model", ["odd"], "a whole number of at least 1"),
    ("savings --model", ["strange"], "strange/config.json is not a configuration"),
    ("savings --model", ["deep"], "config.json is not JSON"),
    ("savings --model", ["taken"], "taken is not JSON"),
    ("savings --model", ["x" * 5000], "File name too long"),
    ("savings --schedule", ["", "many", "nan@8K", "15T@", "1e400@8K"], "write 15T@8K,100B@128K"),
    (
        "savings --schedule",
        ["0T@8K", NINES + "T@8K", "1T@99999999M"],
        "1 to 1e+18 tokens in contexts of 1 to 1.09951e+12 are allo",
    ),
    ("savings --schedule llama3 --long-tokens", ["", "many", "nan", "-1", "0", NINES], "written as 800B"),
    ("savings --hardware", [""], "there are h100, h200, b200, a100, l40s, rtx4090, l4, t4, m"),
    ("savings --hardware", ["h10"], "did you mean h100?"),
    ("savings --mfu", ["-1", "1e300"], "it must be above 0 and at most 1"),
    ("savings --local", ["-1", "1e300"], "0 to 1 is allowed"),
    ("eval passkey", [""], "a name is needed"),
    ("eval passkey", ["no-such", "taken"], "is neither a shipped model"),
    ("eval passkey", ["odd"], "a whole number from 1 to"),
    ("eval passkey", ["empty"], "a model's folder or one of"),
    ("eval passkey", ["strange"], "names with values are needed"),
    ("eval passkey", ["deep"], "config.json is not JSON"),
    (
        "eval passkey bam-tiny --lengths",
        ["", "many", "nanx", "infx", "-1", MANY, "512,", "1" * 5000],
        "or multiples of the training length",
    ),
    (
        "eval passkey bam-tiny --depths",
        ["", "many", "0", "nan", MANY, NINES],
        "a whole number from 1 to 1000 is needed",
    ),
    ("eval passkey bam-tiny --wording", ["", "odd"], "allowed are standard, train, validation, fresh"),
    ("eval passkey bam-tiny --keys", ["", "many", "0-2", NINES], "a whole number from 1 to 1000 is needed"),
    ("eval passkey bam-tiny --keys", ["5-3", "1-1000"], "1 to 20 are allowed"),
    ("eval passkey bam-tiny --digits", ["-1", MANY], "3 to 50 are allowed"),
    ("eval passkey bam-tiny --haystack", ["no-such.txt", "folder"], "bland, hard, text or a text file is needed"),
    ("eval passkey bam-tiny --haystack", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("eval passkey bam-tiny --haystack", ["taken", "empty.txt"], "a haystack needs at least 100"),
    ("eval passkey bam-tiny --tokenizer", [""], "a name is needed"),
    ("eval passkey bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("eval passkey bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("eval needle", [""], "a name is needed"),
    ("eval needle", ["no-such", "taken"], "is neither a shipped model"),
    ("eval needle", ["odd"], "a whole number from 1 to"),
    ("eval needle", ["empty"], "a model's folder or one of"),
    ("eval needle", ["strange"], "names with values are needed"),
    ("eval needle", ["deep"], "config.json is not JSON"),
    (
        "eval needle bam-tiny --task",
        ["", "odd", "single,odd"],
        "there are single, single-text, single-uuid, multikey, mult",
    ),
    (
        "eval needle bam-tiny --lengths",
        ["", "many", "nanx", "infx", "-1", MANY, "512,", "1" * 5000],
        "or multiples of the training length",
    ),
    ("eval needle bam-tiny --tokenizer", [""], "a name is needed"),
    ("eval needle bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("eval needle bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("eval harness", [""], "a name is needed"),
    ("eval harness", ["no-such", "taken"], "is neither a shipped model"),
    ("eval harness", ["odd"], "a whole number from 1 to"),
    ("eval harness", ["empty"], "a model's folder or one of"),
    ("eval harness", ["strange"], "names with values are needed"),
    ("eval harness", ["deep"], "config.json is not JSON"),
    ("eval harness bam-tiny --tokenizer", [""], "a name is needed"),
    ("eval harness bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("eval harness bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("eval perplexity", [""], "a model's folder or one of"),
    ("eval perplexity", ["no-such"], "is neither a shipped model"),
    ("eval perplexity", ["odd"], "a whole number from 1 to"),
    (
        "eval perplexity bam-tiny --lengths",
        ["0.0001x", "", "many", "nanx", "infx", "-1", MANY, "512,", "1" * 5000],
        "or multiples of the training length",
    ),
    ("eval perplexity bam-tiny --by", ["", "odd"], "is not one of 'context', 'position'"),
    ("eval perplexity bam-tiny --text", [""], "bundled, a file, a folder or hf:owner/name is needed"),
    ("eval perplexity bam-tiny --text", ["no-such.txt"], "there is no file or folder no-such.txt"),
    ("eval perplexity bam-tiny --text", ["empty"], "has no .txt"),
    ("eval perplexity bam-tiny --text", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("eval perplexity bam-tiny --text", ["deep.jsonl"], "is not JSON with a field"),
    ("eval perplexity bam-tiny --text", ["number.jsonl"], "a text is needed"),
    (
        "eval perplexity bam-tiny --text",
        ["taken", "empty.txt"],
        "two windows of 128 with 8,192 before them do not fit in it",
    ),
    ("eval perplexity bam-tiny --tokenizer", [""], "a name is needed"),
    ("eval perplexity bam-tiny --tokenizer", ["no-such"], "shipped one nor a folder"),
    ("eval perplexity bam-tiny --tokenizer", ["empty", "odd"], "no tokenizer that can be loaded"),
    ("convergence gaussian --lengths", [""], "a name is needed"),
    (
        "convergence gaussian --lengths",
        ["many", "5000", "nan-5", NINES + "-3", "100-999999999999"],
        "give two numbers of tokens such as 1000-30000",
    ),
    ("convergence gaussian --lengths", ["500-100", "1-100"], "the first must be smaller, and at least 2"),
    (
        "convergence gaussian --scales",
        ["", "many", "nan-50", "0-1", "50-0.05", "1-inf"],
        "give two positive numbers such as 0.05-50",
    ),
    ("convergence uniform --law", ["", "cube"], "is not one of 'gaussian', 'sphere', 'mixture'"),
    (
        "convergence uniform --radii",
        ["", "many", "nan", "inf", "1,nan", "-1", "1e300"],
        "give positive numbers with commas between them, below 1e6",
    ),
    ("convergence uniform --lengths", [""], "a name is needed"),
    (
        "convergence uniform --lengths",
        ["many", "5000", "nan-5", NINES + "-3", "100-999999999999"],
        "give two numbers of tokens such as 1000-30000",
    ),
    ("convergence uniform --lengths", ["500-100", "1-100"], "the first must be smaller, and at least 2"),
    ("convergence hardmax --law", ["", "cube"], "is not one of 'gaussian', 'sphere'"),
    (
        "convergence hardmax --sharpness",
        ["", "many", "nan", "0", "1,nan", "1e300"],
        "give positive numbers with commas between them, below 1e6",
    ),
    ("convergence hardmax --lengths", [""], "a name is needed"),
    (
        "convergence hardmax --lengths",
        ["many", "5000", "nan-5", NINES + "-3", "100-999999999999"],
        "give two numbers of tokens such as 1000-30000",
    ),
    ("convergence hardmax --lengths", ["500-100", "1-100"], "the first must be smaller, and at least 2"),
    ("convergence model", ["no-such"], "is neither a shipped model"),
    ("convergence model", ["odd"], "a whole number from 1 to"),
    ("convergence model", ["empty"], "a model's folder or one of"),
    ("convergence model bam-tiny --text", [""], "bundled, a file, a folder or hf:owner/name is needed"),
    ("convergence model bam-tiny --text", ["no-such.txt"], "there is no file or folder no-such.txt"),
    ("convergence model bam-tiny --text", ["empty"], "has no .txt"),
    ("convergence model bam-tiny --text", ["bytes.txt"], "bytes.txt is not text in UTF-8"),
    ("convergence model bam-tiny --text", ["deep.jsonl"], "is not JSON with a field"),
    ("convergence model bam-tiny --text", ["number.jsonl"], "a text is needed"),
    ("convergence model bam-tiny --text", ["taken", "empty.txt"], "512 are needed"),
    ("convergence model bam-tiny --sampling", ["", "odd"], "is not one of 'iid', 'window'"),
    ("convergence model bam-tiny --lengths", [""], "a name is needed"),
    (
        "convergence model bam-tiny --lengths",
        ["many", "5000", "nan-5", NINES + "-3", "100-999999999999"],
        "give two numbers of tokens such as 1000-30000",
    ),
    ("convergence model bam-tiny --lengths", ["500-100", "1-100"], "the first must be smaller, and at least 2"),
    ("convergence prior --lengths", [""], "a name is needed"),
    (
        "convergence prior --lengths",
        ["many", "5000", "nan-5", NINES + "-3", "100-999999999999"],
        "give two numbers of tokens such as 1000-30000",
    ),
    ("convergence prior --lengths", ["500-100", "1-100"], "the first must be smaller, and at least 2"),
    (
        "bench attention --lengths",
        ["", "many", "nanx", "infx", "-1", MANY, "512,", "1" * 5000],
        "at least 64 and at most",
    ),
    ("bench long --lengths", ["", "many", "nanx", "infx", "-1", MANY, "512,", "1" * 5000], "at least 64 and at most"),
    ("bench long --decode", ["", "many", "nan", "-1", MANY], "at least 64 and at most"),
    ("bench conditioned --lengths", ["", "many", "nanx", "-1", MANY, "512,", "1" * 5000], "at least 64 and at most"),
    ("bench conditioned --training", ["", "many", "nan", "-1", MANY], "at least 64 and at most"),
    ("bench step --lengths", ["", "many", "nanx", "-1", MANY, "512,", "1" * 5000], "at least 64 and at most"),
    (
        "bench short --shapes",
        [
            "",
            "many",
            "-1",
            MANY,
            "16x4x128",
            "16x4x128x32,",
            "0x4x128x32",
            "16x4:3x128x32",
            "16x4:0x128x32",
            "16x4x128x32/0",
            "16x4x128x32/129",
            "16x4xnanx32",
            "1x1x999999999x64",
            "1" * 5000,
        ],
        "give shapes such as 16x4x128x32",
    ),
]


def number(option: str, least: str, most: str = "", allowed: str = "") -> list[Line]:
    """Lines of an option with a number that is not whole; the range may be told in words of our own."""
    lines: list[Line] = [(option, ["many", ""], "a valid number")]
    if allowed:
        return [*lines, (option, ["nan", "inf", "-inf"], "a finite number"), (option, ["1e300", "-1"], allowed)]
    return [
        *lines,
        (option, ["-1", "-inf"], f"equal to {least}"),
        (option, ["nan", "inf", "1e300"], f"equal to {most}"),
    ]


def whole(option: str, least: int, most: int, allowed: str = "") -> list[Line]:
    """Lines of an option with a whole number."""
    lines: list[Line] = [(option, ["many", "", "1.5", "nan", "inf"], "a valid integer")]
    if allowed:
        return [*lines, (option, [MANY, "-1"], allowed)]
    return [*lines, (option, [str(least - 1), "-1000"], f"equal to {least}"), (option, [MANY], f"equal to {most}")]


def places(command: str, written: str) -> list[Line]:
    """Lines of --json and --out."""
    lines: list[Line] = [
        (f"{command} --json", ["folder", ""], "it is a folder; the name of a file is needed"),
        (f"{command} --json", ["taken/x.json"], "taken/x.json cannot be written: Not a directory"),
        (f"{command} --json", ["/dev/full"], "/dev/full cannot be written: it is not a regular file"),
        (f"{command} --json", ["x" * 250], "cannot be written: File name too long"),
    ]
    return lines + ([(f"{command} --out", ["taken"], f"taken/{written} cannot be written")] if written else [])


STUDIES = ("gaussian", "sphere", "mixture", "uniform", "hardmax", "model bam-tiny", "prior")
NUMBERS: list[Line] = [
    *whole("priors --tokens", 2, 2**24),
    *whole("inspect bam-tiny --tokens", 64, 8192),
    *whole("advise bam-tiny --length", 128, 2**24),
    *number("advise bam-tiny --delta", "", allowed="it must be at least 1e-6 and less than 2"),
    *whole("savings --document", 1, 2**40),
    *whole("savings --span", 1, 2**40),
    *number("savings --mfu", "", allowed="it must be above 0 and at most 1"),
    *number("savings --price", "0", "1000000"),
    *number("savings --local", "", allowed="0 to 1 is allowed"),
    *whole("eval passkey bam-tiny --trials", 1, 10**6),
    *whole("eval passkey bam-tiny --digits", 3, 50, allowed="3 to 50 are allowed"),
    *whole("eval needle bam-tiny --trials", 1, 10**6),
    *whole("eval harness bam-tiny --length", 64, 2**40),
    *whole("eval harness bam-tiny --limit", 1, 10**9),
    *whole("eval harness bam-tiny --shots", 0, 1000),
    *whole("eval perplexity bam-tiny --windows", 2, 2**20),
    *number("bench long --longest", "0.1", "1000000"),
    *number("bench conditioned --longest", "0.1", "1000000"),
    *whole("bench load --tries", 1, 1000),
    *number("bench load --seconds", "0.1", "600"),
    *number("convergence prior --scale", "0", "1000"),
    *whole("convergence model bam-tiny --tokens", 32, 2**20),
    *(line for law in STUDIES[:3] for line in whole(f"convergence {law} --number", 1, 100)),
    *(line for law in STUDIES[:3] for line in whole(f"convergence {law} --share", 1, 2**20)),
    *(line for law in STUDIES[:3] for line in number(f"convergence {law} --variance", "0.000001", "1000000")),
    *(
        line
        for law in STUDIES[:5]
        for line in whole(f"convergence {law} --dimension", 2, 4096, "2 to 4096 are allowed")
    ),
    *(line for study in STUDIES for line in whole(f"convergence {study} --points", 3, 1000)),
    *(line for study in STUDIES for line in whole(f"convergence {study} --replicates", 1, 10**6)),
]
WRITTEN = {
    "inspect bam-tiny": "inspect.json",
    "advise bam-tiny": "advise.json",
    "savings": "savings.json",
    "compare good.json good.json": "compare.json",
    "eval passkey bam-tiny": "passkey.json",
    "eval needle bam-tiny": "needle.json",
    "eval harness bam-tiny": "harness.json",
    "eval perplexity bam-tiny": "perplexity.json",
    "bench attention": "attention.json",
    "bench long": "long.json",
    "bench short": "short.json",
    "bench step": "step.json",
    "bench load": "load.json",
    "bench conditioned": "conditioned.json",
    **{f"convergence {study}": f"convergence-{study.split()[0]}.json" for study in STUDIES},
}
SEEDED = (
    "demo",
    "eval passkey bam-tiny",
    "eval needle bam-tiny",
    "bench attention",
    "bench long",
    "bench short",
    "bench step",
    "bench load",
    "bench conditioned",
    *(f"convergence {s}" for s in STUDIES),
)
LONG = (
    "eval passkey bam-tiny",
    "eval needle bam-tiny",
    "eval perplexity bam-tiny",
    "bench attention",
    "bench long",
    "bench short",
    "bench step",
    "bench load",
    "bench conditioned",
)
LINES: list[Line] = [
    *TABLE,
    *(
        (
            f"{command} --budget",
            ["", "many", "nans", "-1s", "infh", "1e400h", "10"],
            "give a time such as 90s, 10m or 2h",
        )
        for command in (*LONG, *(f"convergence {study}" for study in STUDIES))
    ),
    *((line[0].replace("gaussian", law), *line[1:]) for law in STUDIES[1:3] for line in TABLE if "gaussian" in line[0]),
    *NUMBERS,
    *(line for command, written in WRITTEN.items() for line in places(command, written)),
    *(line for command in SEEDED for line in whole(f"{command} --seed", 0, 2**32)),
    ("demo --out", ["taken"], "taken/passkey.png cannot be written"),
    ("priors --out", ["taken"], "taken/priors.png cannot be written"),
    ("report good.json --out", ["/", "", "folder"], "it is a folder; the name of a file is needed"),
    ("report good.json --out", ["taken/page.html"], "taken/page.html cannot be written: Not a directory"),
    ("eval harness bam-tiny --tasks", ["", "no-such"], "lm-eval"),
    ("", ["no-such-command"], "No such command 'no-such-command'"),
    ("eval", ["no-such-command"], "No such command 'no-such-command'"),
    ("savings", ["--no-such-option"], "No such option: --no-such-option"),
    ("savings", ["--json"], "Option '--json' requires an argument"),
    ("savings", ["llama"], "Got unexpected extra argument"),
    ("savings", ["--recompute=3"], "Option '--recompute' does not take a value"),
    ("eval", ["passkey"], "Missing argument 'MODEL'"),
]
# These are run through the real executable.
EXECUTABLE: list[Row] = [
    Row("savings --mfu", "nan", "a finite number is needed"),
    Row("report good.json --out", "/", "/ cannot be written: it is a folder"),
    Row("eval passkey bam-tiny --lengths", "999999999999", "tokens would fit"),
    Row("savings --json", "/dev/full", "/dev/full cannot be written: it is not a regular file"),
    Row("inspect", "odd", "hidden_size in its config.json is 'many'"),
    Row("compare good.json", "nested.json", "nested.json is not a file of results: it is not JSON"),
    Row("", "no-such-command", "No such command 'no-such-command'"),
    Row("demo --out", "taken", "taken/passkey.png cannot be written: Not a directory"),
    Row("advise bam-tiny --text", "deep.jsonl", "line 1 of deep.jsonl is not JSON with a field"),
    Row("savings --schedule", "many", "cannot be read from character 1 on"),
    Row("savings --model", "deep", "config.json is not JSON"),
    Row("eval needle bam-tiny --task", "odd", "there is no task 'odd'"),
    Row("eval perplexity bam-tiny --text", "bytes.txt", "bytes.txt is not text in UTF-8"),
    Row("eval passkey bam-tiny --haystack", "folder", "bland, hard, text or a text file is needed"),
    Row("eval passkey bam-tiny --tokenizer", "empty", "no tokenizer that can be loaded"),
    Row("convergence model", "strange", "names with values are needed"),
    Row("convergence uniform --radii", "1,nan", "give positive numbers with commas between them"),
    Row("bench attention --lengths", MANY, "give whole numbers of tokens"),
    Row("bench long --out", "taken", "taken/long.json cannot be written: Not a directory"),
    Row("priors --tokens", MANY, "less than or equal to 16777216"),
]
