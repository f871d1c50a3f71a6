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

// isPlaceholder knows constants that boards of one vendor share: one byte repeated, the AMI sample, Supermicro's default and
// Dell's without a service tag (https://github.com/systemd/systemd/issues/5236 and the samples in dmidecode's issues). Each in
// both byte orders, since which of them is printed depends on the SMBIOS version (before or from 2.6).
func isPlaceholder(uuid string) bool {
	digits := strings.ReplaceAll(uuid, "-", "")
	if digits == strings.Repeat(digits[:2], len(digits)/2) {
		return true
	}

	switch uuid {
	case "03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009", // AMI
		"12345678-1234-5678-90ab-cddeefaabbcc", "78563412-3412-7856-90ab-cddeefaabbcc",
		"4c4c4544-0000-2010-8020-80c04f202020", "44454c4c-0000-1020-8020-80c04f202020": // Dell without a service tag
		return true
	}

	return false
}
