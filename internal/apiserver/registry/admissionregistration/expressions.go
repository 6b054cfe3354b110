package admissionregistration

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/environment"

	"portal/internal/apiserver/registry/rules"
)

// expressions compiles the expressions of one object. Its compiler knows the variables that were declared so far.
type expressions struct {
	compiler cel.Compiler
	params   bool
	// stored are expressions that the object already had: they may use what newer ones may not.
	stored map[string]bool
}

// environments are costly to make, and shared.
var (
	baseEnvironment = sync.OnceValue(func() *environment.EnvSet {
		return environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion())
	})
	plainCompiler = sync.OnceValue(func() cel.Compiler { return cel.NewCompiler(baseEnvironment()) })
)

// withVariables returns expressions that may declare variables.
func withVariables(params bool, stored map[string]bool) (*expressions, error) {
	compiler, err := cel.NewCompositedCompiler(baseEnvironment())
	return &expressions{compiler: compiler, params: params, stored: stored}, err
}

func (e *expressions) kind(text string) environment.Type {
	if e.stored[text] {
		return environment.StoredExpressions
	}
	return environment.NewExpressions
}

// compile says what is wrong with an expression.
func (e *expressions) compile(path *field.Path, text string, as cel.ExpressionAccessor, vars cel.OptionalVariableDeclarations) field.ErrorList {
	return complaint(path, text, e.compiler.CompileCELExpression(as, vars, e.kind(text)).Error)
}

// full are the variables of most expressions.
func (e *expressions) full() cel.OptionalVariableDeclarations {
	return cel.OptionalVariableDeclarations{HasParams: e.params, HasAuthorizer: true}
}

func complaint(path *field.Path, text string, err *apiservercel.Error) field.ErrorList {
	switch {
	case err == nil:
		return nil
	case err.Type == apiservercel.ErrorTypeRequired:
		return field.ErrorList{field.Required(path, err.Detail)}
	case err.Type == apiservercel.ErrorTypeInvalid:
		return field.ErrorList{field.Invalid(path, text, err.Detail)}
	}
	return field.ErrorList{field.InternalError(path, err)}
}

const missingExpression = "an expression in CEL"

func blank(text string) bool { return strings.TrimSpace(text) == "" }

// maxConditions is how many match conditions one object may have.
const maxConditions = 64

// validateConditions validates match conditions.
func validateConditions(path *field.Path, conditions []v1.MatchCondition, params bool, stored map[string]bool) field.ErrorList {
	var errs field.ErrorList
	if len(conditions) > maxConditions {
		errs = append(errs, field.TooMany(path, len(conditions), maxConditions))
	}
	e := &expressions{params: params, stored: stored}
	seen := map[string]bool{}
	for i, condition := range conditions {
		at := path.Index(i)
		if blank(condition.Expression) {
			errs = append(errs, field.Required(at.Child("expression"), missingExpression))
		} else {
			e.compiler = plainCompiler()
			text := strings.TrimSpace(condition.Expression)
			errs = append(errs, e.compile(at.Child("expression"), text, &matchconditions.MatchCondition{Expression: text}, e.full())...)
		}
		switch {
		case condition.Name == "":
			errs = append(errs, field.Required(at.Child("name"), "a name for logs and metrics"))
		case seen[condition.Name]:
			errs = append(errs, field.Duplicate(at.Child("name"), condition.Name))
		default:
			errs = append(errs, rules.QualifiedName(at.Child("name"), condition.Name)...)
		}
		seen[condition.Name] = true
	}
	return errs
}

var (
	identifier = regexp.MustCompile(`^[_a-zA-Z][_a-zA-Z0-9]*$`)
	// keywords of CEL can't name a variable.
	keywords = strings.Fields("as break const continue else false for function if import in let loop namespace null package return true var void while")
)

// declare validates a variable, and lets later expressions use it.
func (e *expressions) declare(path *field.Path, variable v1.Variable) field.ErrorList {
	var errs field.ErrorList
	if blank(variable.Name) {
		errs = append(errs, field.Required(path.Child("name"), "the name by which expressions use it"))
	} else if !identifier.MatchString(variable.Name) || slices.Contains(keywords, variable.Name) {
		errs = append(errs, field.Invalid(path.Child("name"), variable.Name, "must be an identifier of CEL"))
	}
	if blank(variable.Expression) {
		return append(errs, field.Required(path.Child("expression"), missingExpression))
	}
	composed, ok := e.compiler.(*cel.CompositedCompiler)
	if !ok {
		return append(errs, field.InternalError(path, fmt.Errorf("the compiler has no variables")))
	}
	result := composed.CompileAndStoreVariable(&validating.Variable{Name: variable.Name, Expression: variable.Expression}, e.full(), e.kind(variable.Expression))
	return append(errs, complaint(path.Child("expression"), variable.Expression, result.Error)...)
}

// validation validates one rule of a ValidatingAdmissionPolicy.
func (e *expressions) validation(path *field.Path, v *v1.Validation) field.ErrorList {
	var errs field.ErrorList
	if blank(v.Expression) {
		errs = append(errs, field.Required(path.Child("expression"), missingExpression))
	} else {
		errs = append(errs, e.compile(path.Child("expression"), v.Expression, &validating.ValidationCondition{Expression: v.Expression}, e.full())...)
	}
	switch at := path.Child("messageExpression"); {
	case v.MessageExpression == "":
	case blank(v.MessageExpression):
		errs = append(errs, field.Invalid(at, v.MessageExpression, "must not be blank"))
	default:
		errs = append(errs, e.compile(at, v.MessageExpression, &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression},
			cel.OptionalVariableDeclarations{HasParams: e.params})...)
	}
	switch at := path.Child("message"); {
	case v.Message != "" && blank(v.Message):
		errs = append(errs, field.Invalid(at, v.Message, "must not be blank"))
	case strings.ContainsAny(strings.TrimSpace(v.Message), "\n\r"):
		errs = append(errs, field.Invalid(at, v.Message, "must be one line"))
	}
	if v.Reason != nil {
		errs = append(errs, rules.OneOf(path.Child("reason"), *v.Reason, reasons...)...)
	}
	return errs
}

// maxAnnotation is how long an expression of an audit annotation may be.
const maxAnnotation = 5 << 10

// annotation validates an audit annotation of a policy with a name.
func (e *expressions) annotation(path *field.Path, policy string, a *v1.AuditAnnotation) field.ErrorList {
	var errs field.ErrorList
	if policy == "" {
		errs = append(errs, field.Invalid(path.Child("key"), a.Key, "the policy needs a name first"))
	} else {
		errs = append(errs, rules.QualifiedName(path.Child("key"), policy+"/"+a.Key)...)
	}
	at, text := path.Child("valueExpression"), strings.TrimSpace(a.ValueExpression)
	switch {
	case text == "":
		return append(errs, field.Required(at, missingExpression))
	case len(text) > maxAnnotation:
		return append(errs, field.Required(at, fmt.Sprintf("must be of %d bytes at most", maxAnnotation)))
	}
	return append(errs, e.compile(at, text, &validating.AuditAnnotationCondition{ValueExpression: text}, e.full())...)
}

// mutation validates one change of a MutatingAdmissionPolicy.
func (e *expressions) mutation(path *field.Path, m *v1.Mutation) field.ErrorList {
	vars := e.full()
	vars.HasPatchTypes = true
	apply, jsonPatch := path.Child("applyConfiguration"), path.Child("jsonPatch")
	switch {
	case m.PatchType == "":
		return field.ErrorList{field.Required(path.Child("patchType"), "ApplyConfiguration, or JSONPatch")}
	case m.PatchType == v1.PatchTypeApplyConfiguration:
		var errs field.ErrorList
		if m.JSONPatch != nil {
			errs = append(errs, field.Invalid(jsonPatch, "", "must not be there with patchType ApplyConfiguration"))
		}
		if m.ApplyConfiguration == nil {
			return append(errs, field.Required(apply, "with patchType ApplyConfiguration"))
		}
		text := strings.TrimSpace(m.ApplyConfiguration.Expression)
		if text == "" {
			return append(errs, field.Required(apply.Child("expression"), missingExpression))
		}
		return append(errs, e.compile(apply.Child("expression"), text, &patch.ApplyConfigurationCondition{Expression: text}, vars)...)
	case m.PatchType == v1.PatchTypeJSONPatch:
		var errs field.ErrorList
		if m.ApplyConfiguration != nil {
			errs = append(errs, field.Invalid(apply, "", "must not be there with patchType JSONPatch"))
		}
		if m.JSONPatch == nil {
			return append(errs, field.Required(jsonPatch, "with patchType JSONPatch"))
		}
		text := strings.TrimSpace(m.JSONPatch.Expression)
		if text == "" {
			return append(errs, field.Required(jsonPatch.Child("expression"), missingExpression))
		}
		return append(errs, e.compile(jsonPatch.Child("expression"), text, &patch.JSONPatchCondition{Expression: text}, vars)...)
	}
	return rules.OneOf(path.Child("patchType"), m.PatchType, v1.PatchTypeApplyConfiguration, v1.PatchTypeJSONPatch)
}

func validatePathSegment(path *field.Path, name string) field.ErrorList {
	return rules.Each(path, name, content.IsPathSegmentName(name))
}
