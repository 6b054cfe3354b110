package backendtest

import (
	"fmt"
	"os"
	"strings"
)

// known is what the node's kernel knows of flows from a port, for somebody who wonders what became of one.
func (s *suite) known(port uint16) string {
	var out strings.Builder
	_ = s.node.do(func() error {
		for file, has := range map[string]string{
			"nf_conntrack": fmt.Sprintf("sport=%d ", port),
			"ip_vs_conn":   fmt.Sprintf(" %04X ", port),
		} {
			text, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				continue // not every kernel has them
			}
			for line := range strings.Lines(string(text)) {
				if strings.Contains(line, has) {
					fmt.Fprintf(&out, "\n%s: %s", file, strings.TrimSpace(line))
				}
			}
		}
		// Packets that went nowhere.
		text, _ := os.ReadFile("/proc/thread-self/net/stat/nf_conntrack")
		fmt.Fprintf(&out, "\nconntrack by processor:\n%s", text)
		return nil
	})
	return out.String()
}
