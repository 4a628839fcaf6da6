"""Classifies a statement by its text: whether it reads or writes, and its table. Pure functions.

The text does not show triggers, functions and views. Where the server shows the locks of a statement, we use those
instead (`snapmgr.mysql.lock.probe`).
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["read", "write", "ddl", "other"]

# Expressions are built at their first use: most commands need none of them.
_NAME = r"(`(?:[^`]|``)+`|[\w$]+)(?:\s*\.\s*(`(?:[^`]|``)+`|[\w$]+))?"
# A text that the server truncated may end within a literal or a comment, which then extends to the end.
_NOT_CODE = r"""(?xs)
    '(?:[^'\\]|\\.|'')*(?:'|\Z)
    | "(?:[^"\\]|\\.|"")*(?:"|\Z)
    | /\*M?!\d* | \*/  # its content is executed
    | /\*.*?(?:\*/|\Z)
    | (?:\#|--(?=\s|\Z))[^\n]*
    """
_BLANKS = "( \t\r\n;"
# MariaDB: settings for the one statement that follows.
_SETTINGS = r"(?is)SET\s+STATEMENT\s.*?\sFOR\s+"
# The same without a literal: the words behind it may be shown.
_PLAIN_SETTING = r"SET STATEMENT \S+ = \S+ FOR "
_FIRST_WORDS = r"\s*((?:[A-Za-z_@.]+)(?:\s+[A-Za-z_@.]+){0,4})(?=\s|$|[^\w@.'\"`])"
_READ_VERBS = ("SELECT", "TABLE", "VALUES")
_WRITE_VERBS = ("INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD")
_DDL_VERBS = ("ALTER", "CREATE", "DROP", "RENAME", "TRUNCATE", "OPTIMIZE", "REPAIR")
_TEMPORARY = r"(?i)(?:CREATE(?:\s+OR\s+REPLACE)?|DROP)\s+TEMPORARY\b"
_LOCKS_ROWS = r"(?i)\bFOR\s+UPDATE\b"
_NOT_JUST_READING = r"(?i)\b(?:INTO|FOR\s+UPDATE|FOR\s+SHARE|IN\s+SHARE\s+MODE)\b"
# mysqldump and mydumper ask for rows with it; the comment is code.
_OF_A_BACKUP = r"(?i)SQL_NO_CACHE\b"
_TARGETS = tuple(
    f"(?i){pattern}{_NAME}"
    for pattern in (
        r"UPDATE\s+(?:(?:LOW_PRIORITY|IGNORE)\s+)*",
        r"(?:INSERT|REPLACE)\s+(?:(?:LOW_PRIORITY|DELAYED|HIGH_PRIORITY|IGNORE|INTO)\s+)*",
        r"DELETE\b[^()]*?\bFROM\s+",
        r"LOAD\s.*?\bINTO\s+TABLE\s+",
        r"ALTER\s+(?:(?:ONLINE|IGNORE)\s+)*TABLE\s+(?:IF\s+EXISTS\s+)?",
        r"CREATE\s+(?:OR\s+REPLACE\s+)?(?:\w+\s+)?INDEX\b[^()]*?\bON\s+",
        r"(?:OPTIMIZE|REPAIR)\s+(?:(?:NO_WRITE_TO_BINLOG|LOCAL)\s+)?TABLES?\s+",
    )
)


def first_words(sql: str) -> str:
    """Return up to five leading words of a statement, up to the first literal, quoted name or bracket."""
    match = re.match(_FIRST_WORDS, re.sub(_PLAIN_SETTING, "", sql, count=1))
    return " ".join(match[1].split()) if match else "statement"


def code(sql: str) -> str:
    """Return a statement without comments, leading brackets and blanks, and with '' for each string.

    The content of an executable comment is code, for any server. SET STATEMENT … FOR is left out.
    """
    text = re.sub(_NOT_CODE, lambda match: "''" if match[0][0] in "'\"" else " ", sql).lstrip(_BLANKS)
    return (text[match.end() :] if (match := re.match(_SETTINGS, text)) else text).lstrip(_BLANKS)


def kind(sql: str) -> Kind:
    """Given a statement's text, return its effect on tables that other sessions see.

    SELECT … FOR UPDATE is a write: it takes the same locks. Statements on temporary tables, and those that neither read
    nor write tables (CALL, SET, LOCK TABLES, EXECUTE), are "other".
    """
    text = code(sql)
    verb = _verb(text)
    if verb == "WITH":
        words = set(re.findall(r"[A-Z]+", text.upper()))
        return "write" if words & {"UPDATE", "DELETE", "INSERT"} else "read"
    if verb in _READ_VERBS:
        return "write" if re.search(_LOCKS_ROWS, text) else "read"
    if verb in _WRITE_VERBS:
        return "write"
    if verb in _DDL_VERBS and not re.match(_TEMPORARY, text):
        return "ddl"
    return "other"


def reads_tables(sql: str) -> bool:
    """Return whether a reading statement names a table at all: SELECT SLEEP(9) does not."""
    text = code(sql)
    return _verb(text) == "TABLE" or re.search(r"\bFROM\b", text, re.IGNORECASE) is not None


def is_only_a_select(sql: str) -> bool:
    """Return whether killing this statement loses only its answer.

    False for a statement that writes (INTO, also INTO @variable), locks rows (FOR UPDATE, FOR SHARE, LOCK IN SHARE
    MODE), has code in a comment, or belongs to a backup (SQL_NO_CACHE). The text must be complete.
    """
    text = code(sql)
    return (
        _verb(text) in ("SELECT", "WITH")
        and kind(sql) == "read"
        and "/*!" not in sql
        and "/*M!" not in sql
        and not re.search(_NOT_JUST_READING, text)
        and not re.search(_OF_A_BACKUP, sql)
    )


def target(sql: str) -> tuple[str | None, str] | None:
    """Return (schema or None, table) that a statement writes or rebuilds; None if the text does not show it.

    Of several tables it returns the first.
    """
    text = code(sql)
    for pattern in _TARGETS:
        if match := re.match(pattern, text):
            first, second = (part and _bare(part) for part in match.groups())
            return (first, second) if second else (None, str(first))
    return None


def _bare(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _verb(text: str) -> str:
    match = re.match(r"[A-Za-z]+", text)
    return match[0].upper() if match else ""
