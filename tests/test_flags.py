"""Flags that do not apply to the method, or name missing files: one line and exit code 2."""

import pytest

from minispec.generate import __main__ as generate


@pytest.mark.parametrize(
    "method, arguments, message",
    [
        ("jacobi", "--window 3", "--window is for --method lookahead"),
        ("lookahead", "--block 3", "--block is for --method jacobi"),
        ("lookahead", "--ngram 1", "ngram 1: must be at least 2"),
        ("medusa", "--tree nonsense", "must be auto, a number of nodes"),
        ("medusa", "--heads nowhere", "no such directory: nowhere"),
        ("speculative", "--tree 3", "--tree is for --method medusa"),
        ("fastmtp", "--tree 4", "--tree is for --method medusa or medusa-typical, not for fastmtp"),
        ("fastmtp", "--heads nowhere", "no such directory: nowhere"),
        ("hybrid", "--heads nowhere", "no such directory: nowhere"),
        ("hybrid", "--draft nowhere", "no such directory: nowhere"),
        ("hybrid", "--draft a --heads b", "--draft and --heads are mutually exclusive"),
        ("hybrid", "--draft a --vocabulary none", "--vocabulary is for heads, not for --draft"),
        ("fastmtp", "--vocabulary nowhere.json", "nowhere.json cannot be read"),
        ("fastmtp", "--k many", "--k: many must be a whole number, at least 1"),
        ("fastmtp", "--vocabulary-size 0", "0 must be a whole number, at least 1"),
        ("fastmtp", "--vocabulary none --vocabulary-size 9", "no vocabulary to take 9 tokens from"),
    ],
)
def test_a_wrong_flag_is_one_line(method, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["x", "--method", method, *arguments.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
