"""The words of a shell script: as much of bash as it takes to say who expands a variable.

Quotes, escapes, comments, here-documents and substitutions are followed; keywords are words like others.
"""

import re
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_NAME = re.compile(r"\w+")
_EXPANSION = re.compile(r"(?<!\\)\$\{?[#!]?([A-Za-z_]\w*)")
_HEREDOC = re.compile(r"<<(-?)[ \t]*([^\s;&|<>()]+)")
_ENDS_A_WORD = " \t\n;&|<>()"


@dataclass
class Word:
    """A word of a command, without its quotes; what is expanded stands as it was written."""

    line: int
    text: str = ""
    expanded: list[tuple[str, int]] = field(default_factory=list)
    """Variables that the shell expands in it before the command starts, and the lines they are on."""
    lines: list[int] = field(default_factory=list)
    """The line of each character of `text`."""

    def add(self, text: str, line: int) -> None:
        """Append text that is on a line."""
        for char in text:
            self.text += char
            self.lines.append(line)
            line += char == "\n"


@dataclass
class Command:
    """A simple command: its words up to the next newline, `;`, `&`, `|` or parenthesis."""

    words: list[Word] = field(default_factory=list)


def read_commands(text: str) -> list[Command]:
    """All commands of a script, those inside substitutions and functions included."""
    scanner = _Scanner(text)
    scanner.commands_until("")
    return scanner.commands


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.commands: list[Command] = []
        self._at = 0
        self._line = 1
        self._heredocs: list[tuple[Command, str, bool, bool]] = []

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self._at >= len(self.text)

    def _sees(self, *texts: str) -> bool:
        return self.text.startswith(texts, self._at)

    def _take(self, count: int = 1) -> str:
        taken = self.text[self._at : self._at + count]
        self._at += count
        self._line += taken.count("\n")
        return taken

    def _to(self, end: str) -> int:
        """Characters up to the next `end`, or all that are left."""
        found = self.text.find(end, self._at)
        return (len(self.text) if found < 0 else found) - self._at

    def _take_past(self, end: str) -> str:
        return self._take(self._to(end) + len(end))

    # --- commands -------------------------------------------------------------------------------------------------

    def commands_until(self, end: str) -> list[Command]:
        """The commands up to the closing character, which is taken too."""
        commands = [Command()]
        while not self._ended:
            if end and self._sees(end):
                self._take()
                break
            if self._sees("\\\n", "&>", ">&", "<&", ">|"):
                self._take(2)
            elif self._sees("<<<"):
                self._take(3)
            elif self._sees("<<"):
                self._open_heredoc(commands[-1])
            elif self._sees("(("):
                commands[-1].words.append(self._arithmetic())
            elif self._sees("("):
                self._take()
                commands += [*self.commands_until(")"), Command()]
            elif self._sees("#"):
                self._take(self._to("\n"))
            elif self._sees("\n"):
                self._take()
                self._read_heredocs()
                commands.append(Command())
            elif self._sees(";", "&", "|", ")"):
                self._take()
                commands.append(Command())
            elif self._sees(" ", "\t", "<", ">"):
                self._take()
            else:
                commands[-1].words.append(self._word())
        commands = [command for command in commands if command.words]
        if not end:
            self.commands += commands
        return commands

    def _open_heredoc(self, command: Command) -> None:
        match = _HEREDOC.match(self.text, self._at)
        if match is None:
            self._take(2)
            return
        self._take(len(match[0]))
        delimiter = re.sub(r"[\"'\\]", "", match[2])
        self._heredocs.append((command, delimiter, delimiter != match[2], match[1] == "-"))

    def _read_heredocs(self) -> None:
        for command, delimiter, is_quoted, strips_tabs in self._heredocs:
            body = Word(self._line)
            while not self._ended:
                line_number, line = self._line, self._take_past("\n")
                if (line.lstrip("\t") if strips_tabs else line).rstrip("\n") == delimiter:
                    break
                body.add(line, line_number)
                if not is_quoted:
                    body.expanded += [(name, line_number) for name in _EXPANSION.findall(line)]
            command.words.append(body)
        self._heredocs.clear()

    # --- words ----------------------------------------------------------------------------------------------------

    def _word(self) -> Word:
        word = Word(self._line)
        while not self._ended and self.text[self._at] not in _ENDS_A_WORD:
            if self._sees("'"):
                self._take()
                line = self._line
                word.add(self._take_past("'").removesuffix("'"), line)
            elif self._sees('"'):
                self._take()
                self._double_quoted(word)
            elif self._sees("$'"):
                self._ansi_quoted(word)
            elif self._sees("$", "`"):
                self._expansion(word)
            else:
                self._character(word)
            if self._sees("(") and ASSIGNMENT.fullmatch(word.text):
                self._array(word)
        return word

    def _character(self, word: Word) -> None:
        if self._sees("\\\n"):
            self._take(2)
            return
        if self._sees("\\"):
            self._take()
        line = self._line
        word.add(self._take(), line)

    def _double_quoted(self, word: Word) -> None:
        while not self._ended:
            if self._sees('"'):
                self._take()
                return
            if self._sees("$", "`"):
                self._expansion(word)
            elif self._sees('\\"', "\\$", "\\`", "\\\\", "\\\n"):
                self._character(word)
            else:
                line = self._line
                word.add(self._take(), line)

    def _ansi_quoted(self, word: Word) -> None:
        self._take(2)
        while not self._ended and not self._sees("'"):
            line = self._line
            word.add(self._take(2 if self._sees("\\") else 1), line)
        self._take()

    def _array(self, word: Word) -> None:
        self._take()
        for command in self.commands_until(")"):
            for inner in command.words:
                word.add(f" {inner.text}", inner.line)
                word.expanded += inner.expanded

    # --- what the shell expands -----------------------------------------------------------------------------------

    def _expansion(self, word: Word) -> None:
        start, line = self._at, self._line
        if self._sees("$(("):
            self._take()
            word.expanded += self._arithmetic().expanded
        elif self._sees("$("):
            self._take(2)
            inner = self.commands_until(")")
            self.commands += inner
            word.expanded += [name for command in inner for part in command.words for name in part.expanded]
        elif self._sees("${"):
            self._braces()
            self._add_names(word, self.text[start : self._at], line)
        elif self._sees("`"):
            self._take()
            self._take_past("`")
            self._add_names(word, self.text[start : self._at], line)
        else:
            self._take()
            name = _NAME.match(self.text, self._at)
            self._take(len(name[0]) if name else 0)
            self._add_names(word, self.text[start : self._at], line)
        word.add(self.text[start : self._at], line)

    def _braces(self) -> None:
        self._take(2)
        while not self._ended and not self._sees("}"):
            if self._sees("${"):
                self._braces()
            else:
                self._take(2 if self._sees("\\") else 1)
        self._take()

    def _arithmetic(self) -> Word:
        start, word = self._at, Word(self._line)
        depth = 0
        while not self._ended:
            depth += self._sees("(")
            depth -= self._sees(")")
            self._take()
            if depth == 0:
                break
        text = self.text[start : self._at]
        word.add(text, word.line)
        self._add_names(word, text, word.line)
        return word

    @staticmethod
    def _add_names(word: Word, text: str, line: int) -> None:
        for match in _EXPANSION.finditer(text):
            word.expanded.append((match[1], line + text.count("\n", 0, match.start())))
