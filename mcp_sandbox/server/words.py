"""What other agents' tools call things, so that a wrong name is answered with ours."""

import difflib
from collections.abc import Iterable, Mapping

PARAMETERS = {
    "code": "cmd command input script snippet source",
    "command": "cmd code commands script bash_command",
    "content": "contents text file_text data body value",
    "cwd": "workdir working_dir working_directory dir directory path",
    "destination": "dst dest to target new_path new_name",
    "glob": "include include_pattern file_pattern type",
    "limit": "head_limit max_results max_count num_lines end_line",
    "new": "new_string new_str new_text replace replacement",
    "offset": "start_line line start view_range",
    "old": "old_string old_str old_text search find",
    "path": "file_path filename file target_file uri dir directory folder",
    "pattern": "regex regexp query search glob",
    "source": "src from old_path path",
}
TOOLS = {
    "delete_file": "rm remove remove_file unlink",
    "edit_file": "multiedit str_replace str_replace_editor str_replace_based_edit_tool apply_patch",
    "exec": "bash sh shell terminal cmd run local_shell run_command run_terminal_cmd",
    "glob": "find file_search",
    "grep": "search rg ripgrep search_files search_file_content codebase_search",
    "list_files": "ls dir list_dir list_directory",
    "move_file": "mv rename",
    "read_file": "cat open view view_file open_file notebookread",
    "run_code": "python ipython jupyter code_interpreter python_repl_ast notebookedit node",
    "skill_activate": "skill",
    "write_file": "create save create_file",
}


def offered(name: str, ours: Iterable[str], table: Mapping[str, str]) -> str:
    """A question that offers what is meant, the first of `ours` that fits; empty if none does."""
    word, known = name.lower(), [*ours]
    called = [each for each in known if word in table.get(each, "").split()]
    likely = called or difflib.get_close_matches(word[:100], known, n=1, cutoff=0.5)
    return f"did you mean {likely[0]}? " if likely else ""
