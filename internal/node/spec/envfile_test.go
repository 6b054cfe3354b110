package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// TestEnvValue: what a file of variables has for a key.
func TestEnvValue(t *testing.T) {
	const file = "# who\n\n  \t\nA='1'\n\tB='two words' # why\n  C='it is \"$HOME\" \\n #3'#c\nD='first\n# second\n\nE='\nF= 'x'\nG=''\nA='again'\nH='crlf'\r\nlast='=x='"
	for key, want := range map[string]string{
		"A": "1", "B": "two words", "C": `it is "$HOME" \n #3`, "D": "first\n# second\n\nE=", "F": "", "G": "", "H": "crlf", "last": "=x=",
	} {
		if got, found, err := envValue(file, key); got != want || !found || err != nil {
			t.Errorf("%s: %q, %t, %v", key, got, found, err)
		}
	}
	for _, missing := range []string{"E", "a", "who", ""} {
		if got, found, err := envValue(file, missing); found || err != nil {
			t.Errorf("%s: %q, %v", missing, got, err)
		}
	}
	for text, want := range map[string]string{
		"A='1'\nsecret": "line 2", "A ='1'": "line 1", "='1'": "line 1", "A=secret": "line 1: the value", `A="secret"`: "line 1: the value", "A=": "line 1: the value", "A='x\n\ny'\nB='secret": "line 4: the single quote",
		"A='x\ny'secret": "line 2: nothing", "A='it''s'": "line 1: nothing", "export A='x'": "line 1", "A='x\x00'": "null",
	} {
		if _, _, err := envValue(text, "K"); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if got, _, err := envValue("A='1'\nsecret", "A"); got != "1" || err != nil {
		t.Errorf("what comes after it: %q, %v", got, err)
	}
}

// TestEnvFromFile: a variable's value comes from a file in a volume. If that or the key in it is missing, the variable is left out where it is
// optional.
func TestEnvFromFile(t *testing.T) {
	facts := Facts{File: func(volume, path string) (string, error) {
		switch volume + "/" + path {
		case "v/a/env":
			return "KEY='value'", nil
		case "v/bad":
			return "KEY=value", nil
		}
		return "", &MissingError{"file in volume " + volume, path}
	}}
	env := func(path, key string, optional bool) ([]string, error) {
		list, _, err := Env(&corev1.Pod{}, &corev1.Container{Env: []corev1.EnvVar{
			{Name: "X", ValueFrom: &corev1.EnvVarSource{FileKeyRef: &corev1.FileKeySelector{VolumeName: "v", Path: path, Key: key, Optional: ptr.To(optional)}}},
			{Name: "Y", Value: "<$(X)>"},
		}}, nil, facts, objects{})
		return list, err
	}
	for _, optional := range []bool{false, true} {
		if list, err := env("a/env", "KEY", optional); err != nil || !slices.Contains(list, "X=value") || !slices.Contains(list, "Y=<value>") {
			t.Errorf("%v, %v", list, err)
		}
		for _, missing := range [][2]string{{"a/env", "OTHER"}, {"none", "KEY"}} {
			list, err := env(missing[0], missing[1], optional)
			if optional && (err != nil || !slices.Contains(list, "Y=<$(X)>") || slices.ContainsFunc(list, func(v string) bool { return strings.HasPrefix(v, "X=") })) {
				t.Errorf("%v: %v, %v", missing, list, err)
			}
			var gone *MissingError
			if !optional && (!errors.As(err, &gone) || !strings.Contains(err.Error(), "env X: ") || gone.Name != missing[0] && gone.Name != missing[1]) {
				t.Errorf("%v: %v", missing, err)
			}
		}
		if _, err := env("bad", "KEY", optional); err == nil || !strings.Contains(err.Error(), "file bad in volume v: line 1") {
			t.Errorf("%v", err)
		}
	}
}
