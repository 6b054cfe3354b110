"""What the laboratory imports: the scenarios beside this file."""

import json
import pathlib

with open(pathlib.Path(__file__).with_name("scenarios.json"), encoding="utf-8") as file:
    content = json.load(file)

SCENARIOS, VARIANTS, NOTES = content["scenarios"], content["variants"], []


def first_service():
    """The Service by whose answers the laboratory sees that the proxies are there."""
    return content["first_service"]
