"""Bugs of published names, and of publish and adopt."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_PUBLISHED = "csrc/backup/shared/published.c"
_ADOPT = "csrc/core/transition/adopt.c"
_OBJECT_CALL = "csrc/core/transition/object_call.c"
_PUBLISH = "csrc/core/transition/publish.c"
_TEST_PUBLISHED = "tests/unit/backup/shared/test_published.c"
_TEST_ADOPT = "tests/unit/core/transition/test_adopt.c"
_TEST_PUBLISH = "tests/unit/core/transition/test_publish.c"
_TEST_LINKS = "tests/unit/core/transition/test_shared_links.c"
_PYTHON = "tests/unit/python/node_store/"

MUTANTS = (
    Mutant(
        "a-damaged-object-is-adopted",
        _ADOPT,
        "memcmp(&found, &range->name, sizeof found) != 0",
        "memcmp(&found, &range->name, 0) != 0",
        (_TEST_ADOPT,),
    ),
    Mutant(
        "the-store-has-the-folder-of-locks-and-pages",
        "csrc/backup/shared/folder.c",
        "    choice.own = OWN;\n",
        "",
        ("tests/unit/backup/shared/test_folder.c",),
    ),
    Mutant(
        "a-damaged-object-keeps-its-name",
        "csrc/backup/shared/entry.c",
        "if (named && unlinkat(folder->objects,",
        "if (named && !named && unlinkat(folder->objects,",
        (_TEST_ADOPT,),
    ),
    Mutant(
        "who-rejects-an-object-finds-it-again",
        "csrc/backup/shared/object.c",
        "        forget_name(store, object);\n        tms_error_append",
        "        tms_error_append",
        ("tests/unit/core/transition/test_shared.c",),
    ),
    Mutant(
        "equal-pieces-need-room-twice",
        _PUBLISH,
        "status == TMS_OK &&\n            tms_shared_object_is_new(",
        "status == TMS_OK &&\n            !tms_shared_object_is_here(",
        (_TEST_PUBLISH,),
    ),
    Mutant(
        "paused-memory-is-published",
        _OBJECT_CALL,
        "while (node && tms_segment_of(node)->state == TMS_SEGMENT_ACTIVE)",
        "while (node && tms_segment_of(node)->state != TMS_SEGMENT_DAMAGED)",
        (_TEST_PUBLISH,),
    ),
    Mutant(
        "what-does-not-fit-is-written",
        _PUBLISH,
        "    if (status == TMS_OK) status = check_room(call, error);\n",
        "    (void)check_room;\n",
        (_TEST_PUBLISH,),
    ),
    Mutant(
        "adopted-objects-are-not-linked",
        _ADOPT,
        "finish(&call->objects, complete && status == TMS_OK);",
        "finish(&call->objects, false);",
        (_TEST_ADOPT,),
    ),
    Mutant(
        "the-links-of-adopted-objects-stay-for-ever",
        "csrc/backup/shared/operations.c",
        "    tms_shared_store_drop_kept(store);\n    tms_shared_registrar_start(store); /*",
        "    tms_shared_registrar_start(store); /*",
        (_TEST_ADOPT,),
    ),
    Mutant(
        "a-name-exists-before-it-is-whole",
        _PUBLISHED,
        """    status = link_objects(&all, objects, count, error);
    if (status == TMS_OK) status = write_manifest(&all, objects, count, contents, error);
    if (status == TMS_OK) status = rename_directory(&all, name, &replaced, error);
""",
        """    status = rename_directory(&all, name, &replaced, error);
    if (status == TMS_OK) status = link_objects(&all, objects, count, error);
    if (status == TMS_OK) status = write_manifest(&all, objects, count, contents, error);
""",
        (_TEST_PUBLISHED,),
    ),
    Mutant(
        "the-weights-of-a-replaced-name-stay",
        _PUBLISHED,
        "    *left = (status != TMS_OK || replaced) && !remove_made(&all);",
        "    *left = status != TMS_OK && !remove_made(&all);",
        (_TEST_PUBLISHED,),
    ),
    Mutant(
        "what-a-publisher-has-left-stays",
        "csrc/backup/shared/folder.c",
        "return errno == EISDIR && remove_publication(folder, holder, name);",
        "return errno == EISDIR || remove_publication(folder, holder, name);",
        (_TEST_PUBLISHED, _TEST_LINKS),
    ),
    Mutant(
        "a-name-without-a-manifest-stays",
        "csrc/backup/shared/folder.c",
        "    remove_unnamed(folder);\n",
        "    (void)remove_unnamed;\n",
        (_TEST_PUBLISHED,),
    ),
    Mutant(
        "the-identity-is-not-compared",
        "torch_memory_saver/node_store/manifest.py",
        "        if self.identity != identity:",
        "        if False:",
        (_PYTHON + "test_manifest.py::test_another_identity_and_the_alignment",),
    ),
    Mutant(
        "ties-are-not-compared",
        "torch_memory_saver/node_store/manifest.py",
        "        if (there.storage, there.offset) != (here.storage, here.offset):",
        "        if there.offset != here.offset:",
        (_PYTHON + "test_manifest.py::test_the_first_difference_is_named",),
    ),
    Mutant(
        "a-removal-ends-a-name-that-is-published-meanwhile",
        "torch_memory_saver/_published.py",
        "            for link, _ in files_in(directory):",
        "            for link, _ in files_in(os.open(encoded, os.O_RDONLY, dir_fd=names)):",
        (_PYTHON + "test_names.py::test_a_removal_leaves_what_is_published_meanwhile",),
    ),
    Mutant(
        "a-parameter-that-loading-replaces-is-no-change",
        "torch_memory_saver/node_store/loading.py",
        'for name, value in vars(module).items() if name != "_buffers"}',
        'for name, value in vars(module).items() if name not in ("_buffers", "_parameters")}',
        (_PYTHON + "test_loading.py",),
    ),
    Mutant(
        "a-load-that-freezes-weights-is-no-change",
        "torch_memory_saver/node_store/loading.py",
        '{"requires_grad": tensor.requires_grad, **vars(tensor), **hooks}',
        "{**vars(tensor), **hooks}",
        (_PYTHON + "test_loading.py",),
    ),
    Mutant(
        "equal-numbers-are-a-change",
        "torch_memory_saver/node_store/loading.py",
        "return one is other or (type(one)",
        "return one is other or (one is other and type(one)",
        (_PYTHON + "test_loading.py",),
    ),
    Mutant(
        "a-description-of-a-model-keeps-its-tensors",
        "torch_memory_saver/node_store/loading.py",
        "weakref.ref(element) if can_go else element",
        "element",
        (_PYTHON + "test_loading.py",),
    ),
    Mutant(
        "every-worker-of-vllm-gets-the-load-format",
        "torch_memory_saver/vllm/plugin.py",
        "        if _selects_loader(vllm_config):\n",
        "        if _selects_loader(vllm_config) or True:\n",
        ("tests/unit/python/vllm/test_plugin.py::test_a_worker_that_selects_the_load_format_gets_it",),
    ),
    Mutant(
        "scratch-memory-that-stays-is-forgotten",
        _ADOPT,
        "    tms_quarantine_add(&saver->quarantine, &memory->quarantined);\n",
        "",
        (_TEST_ADOPT,),
    ),
)
