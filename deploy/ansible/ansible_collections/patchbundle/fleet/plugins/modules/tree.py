#!/usr/bin/python
"""One tree of a host: look at it, bring it to a level, end a run that was interrupted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tree
short_description: A pinned series of patches on one tree
description:
  - Runs the tools of a patch bundle on the host, and takes what they say.
  - In check mode nothing is written; a change is checked as far as it can be without writing.
options:
  tool:
    description: The bundle on the host, its C(tools/apply.py) or its one file.
    type: path
    required: true
  python:
    description: The interpreter that runs it. The default is the one that runs this module.
    type: path
  root:
    description: The tree, as the option C(--root) of the tools.
    type: path
    required: true
  role:
    description: Only bases of this role.
    type: str
    choices: [prefill, decode, router]
  state:
    description:
      - C(looked) changes nothing. C(applied) and C(reverted) go up and down, to O(level) if it is given.
      - C(restored) ends an interrupted run, back if that is open, and then goes to O(level) from wherever the tree is.
    type: str
    choices: [looked, applied, reverted, restored]
    default: looked
  level:
    description: A patch's id, or C(base).
    type: str
  require_signature:
    description: Refuse a bundle that this minisign key, or the one in this file, did not sign. Of C(applied).
    type: str
  signature:
    description: Where the signature is, if it is not in the bundle.
    type: path
author:
  - the authors of patchbundle
"""

EXAMPLES = r"""
- name: Look
  patchbundle.fleet.tree:
    tool: "{{ patchbundle_tool }}"
    root: "{{ patchbundle_root }}"

- name: Apply
  patchbundle.fleet.tree:
    tool: "{{ patchbundle_tool }}"
    root: "{{ patchbundle_root }}"
    state: applied
"""

RETURN = r"""
ansible_facts:
  description: RV(ansible_facts.patchbundle) is how the tree stands, after the task.
  returned: always
  type: dict
  contains:
    patchbundle:
      description:
        - RV(ansible_facts.patchbundle.state) is one of C(base), C(patched), C(drifted), C(interrupted), C(busy) and
          C(unknown). C(level) is the number of patches, C(name) the top one's id or C(base), both null where there is
          level; C(bundle) the digest of the bundle on the host; C(role), C(base) and C(root) as found.
      type: dict
reason:
  description: The word of the refusal.
  returned: failed
  type: str
"""

import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

_DONE, _NOTHING, _RECOVERY, _BUSY = 0, 3, 4, 5


class Tools:
    """The tools of the bundle, on this host's tree."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params

    def run(self, verb: str, *more: str, target: bool = True) -> tuple[int, dict[str, Any]]:
        """One verb: its exit code and the JSON that it printed; an empty table if it printed none."""
        words = [self.params["python"] or sys.executable, self.params["tool"], verb]
        words += ["--root", self.params["root"], "--json"]
        if target and self.params["role"]:
            words += ["--role", self.params["role"]]
        code, out, err = self.module.run_command([*words, *more], environ_update={"LC_ALL": "C"})
        try:
            table = json.loads(out)
        except ValueError:
            return code, {"result": {}, "error": {"reason": "no-answer", "message": (err or out).strip()[-500:]}}
        return code, table

    def look(self) -> dict[str, Any]:
        """How the tree stands."""
        code, table = self.run("status")
        status = table["result"].get("status", {})
        error = table["error"] or {}
        if code == _RECOVERY:
            state = "interrupted"
        elif code == _BUSY:
            state = "busy"
        elif not status:
            state = "unknown"
        elif status["level"] is None:
            state = "drifted"
        else:
            state = "patched" if status["level"] else "base"
        return {
            "state": state,
            "level": status.get("level"),
            "name": status.get("name") if status.get("level") is not None else None,
            "levels": ["base", *status.get("levels", [])],
            "release": status.get("release"),
            "bundle": status.get("bundle"),
            "base": status.get("base"),
            "role": status.get("role"),
            "root": table["result"].get("target", {}).get("root", self.params["root"]),
            "reason": error.get("reason"),
            "where": error.get("where") or error.get("message"),
        }

    def change(self, verb: str, level: str | None) -> bool:
        """Go up or down; whether anything was, or in check mode would be, changed."""
        words = ["--to", level] if level else []
        if verb == "apply" and self.params["require_signature"]:
            words += ["--require-signature", self.params["require_signature"]]
            words += ["--signature", self.params["signature"]] if self.params["signature"] else []
        if self.module.check_mode:
            words.append("--dry-run")
        code, table = self.run(verb, *words)
        if code not in (_DONE, _NOTHING):
            self.fail(verb, code, table)
        return code == _DONE

    def restore(self, level: str | None) -> bool:
        """End an interrupted run, then go to the level; whether anything was changed."""
        found = self.look()
        changed = False
        if found["state"] == "interrupted":
            if self.module.check_mode:
                return True
            code, table = self.run("recover", "--back", target=False)
            if code == _RECOVERY:
                # The way back is no longer open: first to the end, then down.
                code, table = self.run("recover", target=False)
            if code not in (_DONE, _NOTHING):
                self.fail("recover", code, table)
            changed = code == _DONE
            found = self.look()
        if found["name"] == level or level is None:
            return changed
        if found["name"] is None or level not in found["levels"]:
            # Nothing of ours was written to such a tree, and nothing is.
            self.fail("restore", 1, {"error": {"reason": found["reason"] or found["state"], "message": found["where"]}})
        down = found["levels"].index(level) < found["levels"].index(found["name"])
        return self.change("revert" if down else "apply", level) or changed

    def fail(self, verb: str, code: int, table: dict[str, Any]) -> None:
        error = table["error"] or {}
        parts = [error.get("message"), error.get("where"), error.get("found")]
        self.module.fail_json(
            msg=f"{verb}: " + "; ".join(part for part in parts if part),
            reason=error.get("reason"),
            next=error.get("next"),
            exit=code,
            ansible_facts={"patchbundle": self.look()},
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "tool": {"type": "path", "required": True},
            "python": {"type": "path"},
            "root": {"type": "path", "required": True},
            "role": {"type": "str", "choices": ["prefill", "decode", "router"]},
            "state": {"type": "str", "choices": ["looked", "applied", "reverted", "restored"], "default": "looked"},
            "level": {"type": "str"},
            "require_signature": {"type": "str"},
            "signature": {"type": "path"},
        },
        supports_check_mode=True,
    )
    tools = Tools(module)
    state, level = module.params["state"], module.params["level"]
    changed = False
    if state == "restored":
        changed = tools.restore(level)
    elif state != "looked":
        changed = tools.change("apply" if state == "applied" else "revert", level)
    module.exit_json(changed=changed, ansible_facts={"patchbundle": tools.look()})


if __name__ == "__main__":
    main()
