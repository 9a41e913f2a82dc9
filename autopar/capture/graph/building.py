"""From the exported program to a Graph: every node in order, in one spelling, in-place writes made functional."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.aliasing.schemas import argument, facts
from autopar.capture.aliasing.storages import Alias, Geometry, Storage
from autopar.capture.aliasing.writes import Writing
from autopar.capture.branches.data_branches import TAKEN, fault_at, pinned_at
from autopar.capture.branches.random_answers import ASK, Question, plain_path
from autopar.capture.graph.dead_operators import has_effect
from autopar.capture.graph.drafts import Ask, Draft, TracedProgram
from autopar.capture.graph.exported_nodes import at, flat, get, is_symbolic, module_of, name_of, source_of, spec_of
from autopar.capture.graph.recorded_calls import recorded_call
from autopar.capture.losses import the_loss
from autopar.capture.passes import DRAFT, PROGRAM, run
from autopar.capture.python.attribute_outputs import own_outputs
from autopar.capture.trace.recording import ASSIGN, BEGIN, END, FUNCTION, HOOK
from autopar.capture.trace.unused_parameters import TOOK_PART
from autopar.errors import CaptureError
from autopar.rules.function import PREFIX
from autopar.torch_private import OpOverload
from autopar.words.graph import PART, WAY, Graph, Node, Ref, Spec

TRUTH = Spec((), "bool")


class GraphBuilder(Writing):
    """Walks the exported FX graph once, in order, and follows every tensor's memory (:mod:`~.storages`)."""

    def __init__(self, module: torch.nn.Module, exported: Any, prefix: str) -> None:
        super().__init__(prefix)
        self.exported = exported
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.held: dict[int, Alias] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.unwritten: dict[str, torch.Tensor] = {}
        """The constants whose values the program takes from the model's own tensors."""
        self.registered = {id(p): name.removeprefix(prefix) for name, p in reversed(self.parameters.items())}
        self.asks: list[Ask] = []
        self.flagged: dict[str, Ref] = {}
        """New values of the flags of branches on data, and of those of what took part, by name."""
        recording = getattr(exported, "recording", None)
        self.noted = {p.untyped_storage()._cdata: p for p in recording.kept} if recording is not None else {}

    def draft(self) -> Draft:
        """Rewrite the exported program, and walk over it.

        Raises:
            CaptureError: an operator cannot be planned, or a write has no functional form; the message names the line.
        """
        run(PROGRAM, TracedProgram(self.exported))
        user, tied = self._placeholders()
        ways, parts = self._flags(TAKEN, WAY), self._flags(TOOK_PART, PART)
        self._watch_effects()
        self.flags, self.part_flags = iter(ways), iter(parts)
        self._walk(self.exported.graph_module)
        outputs, loss = self._outputs()
        self._check_changed_by_data(outputs)
        updates = self._updates() | self.flagged
        return Draft(self._without_strangers(), outputs, loss, tied, updates, user, self.asks)

    def finished(self, draft: Draft) -> tuple[Graph, list[int | None]]:
        """Return the graph of a draft, and for every input of the exported program its node, or None."""
        for name in self.constants.keys() & draft.updates.keys():  # the model's own may change before the program runs
            self.constants[name] = self.constants[name].detach().clone()
        self.unwritten = {name: self.constants[name] for name in self.constants.keys() - draft.updates.keys()}
        draft = run(DRAFT, replace(draft, refusals=self.refusals))
        return draft.graph, draft.user

    def asked(self, fx: torch.fx.Node, condition: Ref, site: str, answer: bool) -> None:
        """Python asks for a random number here."""
        question = Question(plain_path(module_of(fx)), site, len(self.asks))
        self.asks.append(Ask(question, len(self.nodes), condition, answer))

    def _flags(self, target: str, prefix: str) -> list[int]:
        """A buffer for each call of an operator, which is to hold its first argument: the numbers of their nodes."""
        graphs = [m.graph for m in self.exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
        flags: list[int] = []
        for fx in (fx for g in graphs for fx in g.nodes if fx.op == "call_function" and name_of(fx.target) == target):
            name, shape = f"{prefix}{len(flags)}", tuple(map(int, fx.args[0].meta["val"].shape))  # type: ignore
            self.constants[name] = torch.zeros(shape, dtype=torch.bool)
            flags.append(self._add(Node(name, "buffer", name, outs=(Spec(shape, "bool"),))).node)
        return flags

    def _took_part(self, fx: torch.fx.Node, taken: Ref, parameters: Sequence[Ref], element: Sequence[int]) -> None:
        """Parameters take part in a call where their elements of ``taken`` are true."""
        flag, module = next(self.part_flags), module_of(fx).removeprefix(self.prefix)
        of = tuple((self.nodes[ref.node].target, e) for ref, e in zip(parameters, element, strict=True))
        self.nodes[flag] = replace(self.nodes[flag], kwargs={"parameters": of}, module=module, source=source_of(fx))
        self.flagged[self.nodes[flag].name] = taken

    def _taken(self, fx: torch.fx.Node, condition: Ref, site: str, answer: bool) -> None:
        """Python goes the way of ``answer`` here: its flag becomes true where the condition is another."""
        region, self.region = self.region, -1
        flag = next(self.flags)
        line, module = site.partition("@")[0], module_of(fx).removeprefix(self.prefix)
        kwargs: dict[str, Any] = {"answer": answer, **({"pinned": True} if pinned_at(site) else {})}
        if fault := fault_at(site):
            kwargs["fault"] = fault
        self.nodes[flag] = replace(self.nodes[flag], kwargs=kwargs, module=module, source=line)
        hot = self.nodes[condition.node].hot

        def op(name: str, *args: Ref) -> Ref:
            return self._add(Node(fx.name, "op", name, args, {}, (TRUTH,), module, line, hot=hot))

        went_otherwise = op("aten.logical_not.default", condition) if answer else condition
        self.flagged[self.nodes[flag].name] = op("aten.logical_or.default", Ref(flag), went_otherwise)
        self.region = region

    def _without_strangers(self) -> list[Node]:
        """The nodes; tensors that want gradients and are no parameters are constants, if no gradient flows to them.

        Raises:
            CaptureError: one does; nothing would train such a tensor.
        """
        strangers = {
            i for i, n in enumerate(self.nodes) if n.kind == "buffer" and n.needs_grad and n.target in self.constants
        }
        for node in self.nodes if strangers else ():
            for ref in node.refs if node.needs_grad else ():
                if ref.node in strangers:
                    shape = tuple(self.nodes[ref.node].out.shape)
                    raise CaptureError(
                        f"{node.where} uses a tensor of shape {shape} that requires grad and is no parameter of the "
                        "model: it is in a list, a dict, a plain attribute or a global, where parameters() does not "
                        "find it, so nothing would train it\n  register it (nn.Parameter as an attribute, "
                        "nn.ModuleList, nn.ParameterList), pass it as an input, or requires_grad_(False) it"
                    )
        return [replace(n, needs_grad=False) if i in strangers else n for i, n in enumerate(self.nodes)]

    # -- placeholders

    def _placeholders(self) -> tuple[list[Any], dict[str, str]]:
        specs = {s.arg.name: s for s in self.exported.graph_signature.input_specs}
        tied: dict[str, str] = {}
        user: list[Any] = []
        memory: dict[int, Storage] = {}
        for fx in self.exported.graph.nodes:
            if fx.op != "placeholder":
                continue
            spec = specs[fx.name]
            kind = spec.kind.name
            val = fx.meta.get("val")
            if kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                target = spec.target.removeprefix(self.prefix)
                tensor = self.parameters.get(spec.target) if kind == "PARAMETER" else self.buffers.get(spec.target)
                if tensor is None:
                    tensor = self.exported.constants.get(spec.target)
                    if tensor is None:
                        tensor = self.exported.state_dict[spec.target]
                    noted = self.noted.get(tensor.untyped_storage()._cdata)
                    if noted is not None and noted.shape == tensor.shape:
                        tensor = noted
                    if id(tensor) in self.registered:  # a parameter of the model's, by another way than its name
                        kind, target = "PARAMETER", self.registered[id(tensor)]
                    else:
                        self.constants[target] = tensor
                if id(tensor) in self.held:
                    alias = self.held[id(tensor)]
                    assert alias.place.storage.origin is not None
                    tied[target] = alias.place.storage.origin[1]
                    self.value[fx] = alias
                    continue
                grads = kind != "BUFFER" and bool(tensor.requires_grad)
                node = Node(target, "param" if kind == "PARAMETER" else "buffer", target, outs=(spec_of(val),),
                            needs_grad=grads, hot=kind == "PARAMETER", module=target.rpartition(".")[0])  # fmt: skip
                self.value[fx] = self.held[id(tensor)] = self._placeholder(node, val)
                storage = self.storages[-1]
                first_there = memory.setdefault(tensor.untyped_storage()._cdata, storage)
                if first_there is not storage and first_there.origin is not None and storage.origin is not None:
                    first_there.shared, storage.shared = storage.origin[1], first_there.origin[1]
            elif kind == "USER_INPUT":
                if isinstance(val, torch.Tensor):
                    # an input that wants a gradient is planned like what depends on parameters
                    grad = bool(val.requires_grad) and val.is_floating_point()
                    node = Node(fx.name, "input", fx.name, outs=(spec_of(val),), needs_grad=grad, hot=grad)
                    alias = self.value[fx] = self._placeholder(node, val)
                    user.append(alias.place.storage.value.node)
                else:
                    self.value[fx] = val
                    user.append(None)
            else:
                raise CaptureError(f"the model has an input of kind {kind} ({fx.name}), which cannot be planned")
        # every name of a tied parameter, also those that torch.export left out
        for name, tensor in self.parameters.items():
            kept = self.held.get(id(tensor))
            short = name.removeprefix(self.prefix)
            if kept is not None and kept.place.storage.origin is not None:
                first_name = kept.place.storage.origin[1]
                if first_name != short:
                    tied.setdefault(short, first_name)
        return user, tied

    def _placeholder(self, node: Node, val: torch.Tensor) -> Alias:
        ref = self._add(node)
        storage = self._fresh(ref, Geometry.of(val))
        storage.origin, storage.begins = (node.kind, node.target), int(val.storage_offset())
        return Alias(storage.first, storage.root)

    def _watch_effects(self) -> None:
        """Mark the buffers that an operator writes beside its schema."""
        for fx in self.exported.graph.nodes:
            if fx.op == "call_function" and has_effect(str(fx.target)):
                for name in ("running_mean", "running_var"):
                    node = argument(fx.target, fx.args, fx.kwargs, name)
                    alias = self.value.get(node) if isinstance(node, torch.fx.Node) else None
                    if isinstance(alias, Alias):
                        alias.place.storage.changing = True

    # -- the walk

    def _walk(self, gm: torch.fx.GraphModule, no_grad: bool = False) -> Any:
        for fx in gm.graph.nodes:
            self.at, self.no_grad = fx, no_grad
            if fx.op == "output":
                return torch.fx.node.map_arg(fx.args[0], lambda n: self.value[n])
            if fx.op == "get_attr":
                attr = get(gm, str(fx.target))
                self.value[fx] = self._constant(attr, str(fx.target)) if isinstance(attr, torch.Tensor) else attr
            elif fx.op != "placeholder":
                self._operator(fx, no_grad)
        return None

    def _constant(self, attr: torch.Tensor, path: str) -> Alias:
        if id(attr) not in self.held:
            name = f"const.{path}"
            self.constants[name] = attr
            self.held[id(attr)] = self._placeholder(Node(name, "buffer", name, outs=(spec_of(attr),)), attr)
        return self.held[id(attr)]

    def _operator(self, fx: torch.fx.Node, no_grad: bool) -> None:
        target = fx.target
        name = name_of(target)
        if target is operator.getitem:
            self.value[fx] = self.value[fx.args[0]][fx.args[1]]  # type: ignore[index]
        elif "wrap_with_set_grad_enabled" in name:
            body = self.value[fx.args[1]]  # type: ignore[index]
            self._pass_in(body, fx.args[2:])
            self.value[fx] = self._walk(body, not fx.args[0])
        elif "wrap_with_autocast" in name:  # its casts are written out
            body = self.value[fx.args[4]]  # type: ignore[index]
            self._pass_in(body, fx.args[5:])
            self.value[fx] = self._walk(body, no_grad)
        elif name == ASSIGN:
            self._assigned(fx)
        elif name in (ASK, TAKEN, TOOK_PART, BEGIN, END, FUNCTION, HOOK):
            self.value[fx] = self._own(fx, name)
        elif getattr(target, "__module__", "") == "_operator":  # of sizes that are not known
            raise self._depends(fx, "what is computed")
        elif not isinstance(target, OpOverload):
            raise CaptureError(
                f"cannot capture '{name}' in '{module_of(fx)}'" + at(fx) + "\n  higher-order operators "
                "(control flow) cannot be planned; write that part with plain tensor operations"
            )
        elif not any(isinstance(v, torch.Tensor) for v in flat(fx.meta.get("val"))) and not facts(target).writes:
            self.value[fx] = fx.meta.get("val")  # of an assert, or a number that depends on data
        else:
            self._sizes_are_known(fx)
            schema = facts(target)
            if schema.renames:
                if schema.pure is None or not facts(schema.pure).may_alias:
                    raise self._refused(fx, "exchanges the memory of a tensor", "make a new tensor instead")
                self.value[fx] = self._pure(fx, schema.pure)
            elif schema.writes:
                self.value[fx] = self._writing(fx, target, schema)
            else:
                self.value[fx] = self._pure(fx, target)

    def _pass_in(self, body: torch.fx.GraphModule, args: Sequence[Any]) -> None:
        """Values of the placeholders of a region."""
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            self.value[placeholder] = self.value[arg] if isinstance(arg, torch.fx.Node) else arg

    def _own(self, fx: torch.fx.Node, name: str) -> Any:
        """An operator of autopar's own in the trace."""
        args: Any = torch.fx.node.map_arg(fx.args, self._look)
        if name == ASK:
            self.asked(fx, *args)
            return []
        if name == TAKEN:
            self._taken(fx, *args)
            return []
        if name == TOOK_PART:
            self._took_part(fx, *args)
            return []
        if name in (BEGIN, END):
            self.region = args[0] if name == BEGIN else -1
            return []
        refs = self._call(fx, *recorded_call(self.exported.recording, name, args))
        if name == HOOK:  # the tensor stays the same; from here on its gradient passes the hook
            alias: Alias = self.value[fx.args[0]]  # type: ignore[index]
            self.memory.passes(alias, refs[0])
            return alias
        storages = [
            self._fresh(ref, Geometry.of(val)) for ref, val in zip(refs, flat(fx.meta.get("val")), strict=False)
        ]
        return [Alias(storage.first, storage.root) for storage in storages]

    def _call(self, fx: torch.fx.Node, callee: Any, leaves: list[Any]) -> list[Ref]:
        """Take a call of a user's function or hook into the graph; its results."""
        outs = tuple(spec_of(v) for v in flat(fx.meta["val"]))
        refs = [x for x in leaves if isinstance(x, Ref)]
        flows = not self.no_grad and any(self.nodes[r.node].needs_grad and self._spec_of(r).is_float for r in refs)
        ref = self._add(
            Node(
                fx.name, "op", PREFIX + callee.name, (callee, *leaves), {}, outs,
                module_of(fx).removeprefix(self.prefix), source_of(fx), flows and any(o.is_float for o in outs),
                any(self.nodes[r.node].hot for r in refs),
            )
        )  # fmt: skip
        return [Ref(ref.node, k) for k in range(len(outs))]

    def _sizes_are_known(self, fx: torch.fx.Node) -> None:
        shapes = [v.shape for v in flat(fx.meta.get("val")) if isinstance(v, torch.Tensor)]
        read = [v for n in fx.all_input_nodes if type(v := self.value[n]) is not Alias]
        if is_symbolic((fx.args, fx.kwargs, read, shapes)):
            raise self._depends(fx, f"'{fx.target}'")

    def _depends(self, fx: torch.fx.Node, what: str) -> CaptureError:
        """The error for what is known only from the values of tensors."""
        return CaptureError(
            f"{what} in '{module_of(fx) or '<model>'}' has a size or a number that depends on the value of a tensor"
            f"{at(fx)}\n  use fixed sizes: a mask or torch.where instead of selecting, tensors instead of item()"
        )

    # -- results

    def _updates(self) -> dict[str, Ref]:
        return {
            s.origin[1]: s.value
            for s in self.storages
            if s.version and s.origin is not None and s.origin[0] in ("buffer", "param")
        }

    def _outputs(self) -> tuple[tuple[Any, ...], int | None]:
        names = [
            s.arg for s in self.exported.graph_signature.output_specs if s.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
        ]
        self.at = next(n for n in self.exported.graph.nodes if n.op == "output")
        self.no_grad = False
        given = list(self.at.args[0])[-len(names) :] if names else []  # type: ignore[arg-type]
        outputs = tuple(self._look(v) if isinstance(v, torch.fx.Node) else v for v in given)
        scalars = [
            i for i, out in enumerate(outputs)
            if isinstance(out, Ref) and self.nodes[out.node].needs_grad and self._spec_of(out).shape == ()
        ]  # fmt: skip
        of_model = own_outputs(self.exported)
        return outputs, the_loss([i for i in scalars if i < of_model.num_leaves], of_model)
