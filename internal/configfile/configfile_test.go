package configfile

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const file = `apiVersion: v1
rules:
- level: Metadata
- level: Nonsense
  resources:
  - group: ""
    resources: ["secrets"]
keys:
- secret: top
`

func TestLine(t *testing.T) {
	for path, want := range map[string]int{
		"apiVersion":                   1,
		"rules":                        2,
		"rules[0].level":               3,
		"rules[1].level":               4,
		"rules[1].resources[0].group":  6,
		"rules[1].resources.resources": 7, // one element: it is that
		"rules[1].verbs":               4, // missing: where it belongs
		"keys.secret":                  9,
		"rules.level":                  0, // which?
		"rules[7].level":               2,
		"":                             0,
	} {
		if got := Line([]byte(file), path); got != want {
			t.Errorf("%s is at line %d, want %d", path, got, want)
		}
	}
	if got := Line([]byte("{"), "a"); got != 0 {
		t.Errorf("in no YAML: %d", got)
	}
}

func TestMistakesNameFieldAndLineAndNoValue(t *testing.T) {
	errs := field.ErrorList{
		field.NotSupported(field.NewPath("rules").Index(1).Child("level"), "Nonsense", []string{"None", "Metadata"}),
		field.Invalid(field.NewPath("keys").Index(0).Child("secret"), "top", "must be longer"),
	}
	got := Mistakes("f.yaml", []byte(file), errs.ToAggregate()).Error()
	for _, want := range []string{"f.yaml line 4: rules[1].level: is not supported", `"Metadata"`, "f.yaml line 9: keys[0].secret: is wrong: must be longer"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	if strings.Contains(got, "top") {
		t.Errorf("a value is repeated: %s", got)
	}
	strict := runtime.NewStrictDecodingError([]error{errorString(`unknown field "rules[0].lvel"`)})
	if got := Mistakes("f.yaml", []byte(file), strict).Error(); got != "f.yaml line 3: rules[0].lvel: there is no such field" {
		t.Error(got)
	}
	if Mistakes("f.yaml", nil, nil) != nil {
		t.Error("no mistake is one")
	}
}

type errorString string

func (e errorString) Error() string { return string(e) }
