"""Shows attrs classes in the API pages with the parameters that attrs gives them; source alone shows none."""

from typing import Any

import griffe


class AttrsSignatures(griffe.Extension):
    """Writes the `__init__` of attrs classes from their fields, unless they have their own."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Is called by griffe for every class that it has read."""
        decorators = [str(decorator.value).partition("(")[0] for decorator in cls.decorators]
        if not {"attrs.frozen", "attrs.define"} & set(decorators) or "__init__" in cls.members:
            return
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for field in cls.members.values():
            if isinstance(field, griffe.Attribute) and field.annotation is not None and "property" not in field.labels:
                parameters += field_parameter(field)
        parameters.sort(key=lambda parameter: parameter.kind is griffe.ParameterKind.keyword_only)
        init = griffe.Function("__init__", parent=cls, parameters=griffe.Parameters(*parameters), returns="None")
        cls.set_member("__init__", init)


def field_parameter(field: griffe.Attribute) -> list[griffe.Parameter]:
    """Returns the parameter that sets `field`; none for a field that is not a parameter."""
    default, kind = field.value, griffe.ParameterKind.positional_or_keyword
    if isinstance(default, griffe.ExprCall) and str(default.function) == "attrs.field":
        given = {each.name: each.value for each in default.arguments if isinstance(each, griffe.ExprKeyword)}
        if str(given.get("init")) == "False":
            return []
        if str(given.get("kw_only")) == "True":
            kind = griffe.ParameterKind.keyword_only
        default = f"{given['factory']}()" if "factory" in given else given.get("default")
    # attrs passes a private field without its underscore.
    return [griffe.Parameter(field.name.lstrip("_"), annotation=field.annotation, kind=kind, default=default)]
