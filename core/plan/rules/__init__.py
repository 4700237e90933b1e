"""The rules that tie keys of a plan together: checks by subject, and the table of all in the order in
which they are reported."""

from .table import RULES, BrokenRule, Rule, broken_rules, rules_about

__all__ = ["RULES", "BrokenRule", "Rule", "broken_rules", "rules_about"]
