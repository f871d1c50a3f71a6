package talos

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// talosconfig is the file that scripts find. It is written once: what one script started may read it while the next one starts.
func (b *Bed) talosconfig() string { return filepath.Join(b.dir, "talosconfig") }

// Shell runs a shell script in the bridge's network, with talosctl and an admin talosconfig, and returns its output.
func (b *Bed) Shell(ctx context.Context, script string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Env = append(os.Environ(),
		"PATH="+filepath.Dir(b.assets.tool("talosctl"))+string(os.PathListSeparator)+os.Getenv("PATH"),
		"TALOSCONFIG="+b.talosconfig(),
		"TALOS_HOME="+b.dir, // talosctl keeps no files elsewhere
	)

	var out []byte

	err := b.bridge.Inside(func() error {
		var err error

		out, err = cmd.Output()

		return err
	})
	if err != nil {
		return out, fmt.Errorf("run %q: %w", script, explain(err))
	}

	return out, nil
}
