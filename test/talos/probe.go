package talos

import (
	"fmt"
	"os"
	"path/filepath"
)

// probeSpec makes the probe an extension service under the product's name, so that a bed looks the same with either.
const probeSpec = `name: talos-ccm
container:
  entrypoint: ./talos-ccm
  mounts:
    - source: /system/run/machined/machine.sock
      destination: /system/run/machined/machine.sock
      type: bind
      options: [bind, ro]
depends:
  - path: /system/run/machined/machine.sock
restart: always
`

const probeManifest = `version: v1alpha1
metadata:
  name: talos-ccm
  version: 0.0.0
  author: The talos-ccm authors
  description: Says what it sees.
  compatibility:
    talos:
      version: ">= 1.10.0"
`

// probeExtension lays out the smallest extension there is, as its image would be.
func probeExtension(dir, program string) error {
	for name, text := range map[string]string{"manifest.yaml": probeManifest, "rootfs/usr/local/etc/containers/talos-ccm.yaml": probeSpec} {
		if err := writeFile(filepath.Join(dir, name), []byte(text)); err != nil {
			return err
		}
	}

	content, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("read probe: %w", err)
	}

	target := filepath.Join(dir, "rootfs/usr/local/lib/containers/talos-ccm/talos-ccm")
	if err := writeFile(target, content); err != nil {
		return err
	}

	if err := os.Chmod(target, 0o755); err != nil {
		return fmt.Errorf("make probe executable: %w", err)
	}

	return nil
}
