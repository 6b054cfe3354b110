package identity

import "testing"

func TestParse(t *testing.T) {
	for _, c := range []struct {
		user    string
		groups  []string
		role    Role
		machine string
	}{
		{"system:portal:proxy:n1", []string{"system:portal:proxies"}, Proxy, "n1"},
		{"system:portal:dns:a.example.org", []string{"system:portal:dns"}, DNS, "a.example.org"},
		{"system:portal:proxy:n1", []string{"system:portal:dns"}, "", ""},
		{"system:portal:proxy:n1", []string{"system:portal:proxies", "system:masters"}, "", ""},
		{"system:portal:proxy:n1", nil, "", ""},
		{"system:portal:proxy:", []string{"system:portal:proxies"}, "", ""},
		{"system:portal:proxy:n1:x", []string{"system:portal:proxies"}, "", ""},
		{"system:portal:controllers", []string{"system:portal:proxies"}, "", ""},
		{"system:node:n1", []string{"system:nodes"}, "", ""},
		{"admin", []string{"system:masters"}, "", ""},
	} {
		role, machine, err := Parse(c.user, c.groups)
		if c.role == "" {
			if err == nil {
				t.Errorf("%s in %v is taken for %s %s", c.user, c.groups, role, machine)
			}
			continue
		}
		if err != nil || role != c.role || machine != c.machine {
			t.Errorf("%s in %v: %s %s, %v", c.user, c.groups, role, machine, err)
		}
		if role.User(machine) != c.user {
			t.Errorf("%s and %s make %s", role, machine, role.User(machine))
		}
	}
}

func TestRolesOfGroups(t *testing.T) {
	for _, r := range Roles {
		if got, ok := RoleOfGroup(r.BootstrapGroup()); !ok || got != r {
			t.Errorf("%s is %s", r.BootstrapGroup(), got)
		}
		if got, err := ParseRole(string(r)); err != nil || got != r {
			t.Errorf("%s is %s, %v", r, got, err)
		}
	}
	if _, ok := RoleOfGroup("system:bootstrappers"); ok {
		t.Error("every token has a role")
	}
	if _, err := ParseRole("admin"); err == nil {
		t.Error("there is a role admin")
	}
}
