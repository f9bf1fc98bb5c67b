"""Tables in the text of a test: a row a line, its cells between bars."""


def rows(table: str) -> list[list[str]]:
    found = []
    for line in table.strip("\n").splitlines():
        found.append([cell.strip() for cell in line.split(" | ")])
    return found
