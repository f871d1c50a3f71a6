package machine

import "strings"

// UUID is the machine's SMBIOS UUID in lower case, or empty if it has none that can identify it: vendors leave
// it zero, all ones, or fill in the same well-known sample on every board.
func (m Machine) UUID() string {
	uuid := strings.ToLower(strings.TrimSpace(m.System.UUID))

	if !isUUID(uuid) || isPlaceholder(uuid) {
		return ""
	}

	return uuid
}

func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}

	for i, c := range s {
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if !strings.ContainsRune("0123456789abcdef", c) {
				return false
			}
		}
	}

	return true
}

// isPlaceholder knows constants that boards of one vendor share: one digit repeated, the AMI sample and
// Supermicro's default (https://github.com/systemd/systemd/issues/5236 and the samples in dmidecode's issues).
func isPlaceholder(uuid string) bool {
	digits := strings.ReplaceAll(uuid, "-", "")
	if strings.Count(digits, digits[:1]) == len(digits) {
		return true
	}

	switch uuid {
	case "03000200-0400-0500-0006-000700080009", // AMI, as printed
		"00020003-0004-0005-0006-000700080009", // AMI, other byte order
		"12345678-1234-5678-90ab-cddeefaabbcc",
		"4c4c4544-0000-2010-8020-80c04f202020": // Dell without a service tag
		return true
	}

	return false
}
