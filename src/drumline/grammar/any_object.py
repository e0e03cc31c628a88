"""Any JSON object, in xgrammar's language.

As a schema it can be said in a line, and the masks of that cost three times as much: what
follows a string there depends on where the string stands, which is looked up for every
id that goes beyond its end. Here each string is a rule together with what follows it, a
name with its colon and a value with the rest of its object or array, so that almost all
ids are decided when the grammar compiles.
"""

_GAP = r"[ \n\t\r]*"
_LETTER = r'[^"\\\x00-\x1f]'


def _rest_of_string(name: str, then: str) -> str:
    """Return a rule for the rest of a string, and what follows it."""
    return rf'{name} ::= {_LETTER} {name} | "\\" escape {name} | "\"" {_GAP} {then}'


ANY_OBJECT = "\n".join(
    (
        rf'root ::= "{{" {_GAP} members',
        rf'members ::= "}}" | "\"" name {_GAP} member',
        _rest_of_string("name", '":"'),
        rf'member ::= "\"" text | plain {_GAP} next_member',
        rf'next_member ::= "}}" | "," {_GAP} "\"" name {_GAP} member',
        _rest_of_string("text", "next_member"),
        r'items ::= "]" | item',
        rf'item ::= "\"" entry | plain {_GAP} next_item',
        rf'next_item ::= "]" | "," {_GAP} item',
        _rest_of_string("entry", "next_item"),
        # What is no string. Numbers stand one by one: each rule more costs every mask something.
        rf'plain ::= "{{" {_GAP} members | "[" {_GAP} items | "true" | "false" | "null"'
        r' | "0" part power | [1-9] [0-9]* part power'
        r' | "-" "0" part power | "-" [1-9] [0-9]* part power',
        r'part ::= "" | "." [0-9] [0-9]*',
        r'power ::= "" | [eE] sign [0-9] [0-9]*',
        r'sign ::= "" | "+" | "-"',
        r'escape ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]',
    )
)
